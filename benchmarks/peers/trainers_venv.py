"""The trainers of TRL and genrl in one environment, with the versions of torch and transformers that this project has."""

from peers.environment import PeerEnvironment

TRAINERS = PeerEnvironment(
    "trl-1.16.0",
    # genrl's trainer imports wandb and tensorboard before it is asked for either
    packages=("torch==2.13.0", "transformers==5.23.0", "peft==0.21.2", "trl==1.16.0", "tensorboard", "wandb"),
    without_dependencies=("gensyn-genrl==0.3.0",),
    made_by="benchmarks/trainer.py --prepare",
)
