"""A slice of a causal language model: layers [a, b) and, at the ends, embedding, final norm and head.

The slice *is* the transformers model, built on torch's meta device from a configuration of b − a layers, with the layer names
of the whole model. Masks, rotary embeddings, sliding windows and caches are the library's own. Only the tensors of the slice
are read from the safetensors files.

    token ids [B, L] ─embed─▶ hidden [B, L, W] ─layers a … b−1─▶ hidden [B, L, W] ─norm, head─▶ logits [.., V]
"""

import copy
import hashlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from swarm.adapters.adapter_state import adapter_parameters
from swarm.adapters.load_pretrained import quiet_libraries
from swarm.config import LoraSection
from swarm.engine.slot_engine import FOLD_SHARE, MergedLayers
from swarm.errors import PipelineError
from swarm.pipeline.commands import ForwardCommand, SharedPrompts
from swarm.pipeline.model_shape import Layout, StagePart, adapter_targets, layout_of, on_meta, read_config
from swarm.policy.answer_head import Head
from swarm.policy.base_folder import weight_files
from swarm.policy.base_model import switch_dropout_off
from swarm.policy.device import available_bytes
from swarm.policy.logprobs import is_plain_layer, repeated_rows
from swarm.policy.lora import attach_adapter

MAX_SHARING = 8
"""Columns of all answers, each counted with its prompt, over `max_states`: each answer has a copy of its prompt's keys."""


class WeightReader:
    """Reads single tensors of a folder, by their names in the files. Files that hold other tensors may be absent."""

    def __init__(self, folder: Path) -> None:
        """Read the headers. Raises PolicyError without weight files, PipelineError for other formats than safetensors."""
        self.num_bytes = 0
        """Bytes of the tensors read so far."""
        self._files: dict[str, Path] = {}
        for path in weight_files(folder):
            if path.suffix != ".safetensors":
                raise PipelineError(
                    f"a pipelined base must hold safetensors, got {path.name} in {folder}; convert it first"
                )
            try:
                with safe_open(path, "pt") as file:
                    self._files |= dict.fromkeys(file.keys(), path)
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from None

    def names(self) -> set[str]:
        """Return the names of all tensors in the files."""
        return set(self._files)

    def read(self, names: Iterable[str]) -> tuple[dict[str, Tensor], str]:
        """Return (tensors by name, SHA-256 of names, types, shapes and contents). Raises PipelineError for absent tensors.

        The hash does not depend on how the tensors are divided into files.
        """
        tensors: dict[str, Tensor] = {}
        digest = hashlib.sha256()
        for name in sorted(set(names)):
            path = self._files.get(name)
            if path is None:
                raise PipelineError(f"a stage's weights must be in the base's files, got no {name}; fetch it again")
            try:
                with safe_open(path, "pt") as file:
                    tensor = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise _unreadable(path, error) from None
            digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            self.num_bytes += tensor.nbytes
            tensors[name] = tensor
        return tensors, digest.hexdigest()


def _unreadable(path: Path, error: Exception) -> PipelineError:
    return PipelineError(
        f"a stage's weights must be readable, got {path}: {' '.join(str(error).split())[:200]}; fetch the model again"
    )


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer in buffers with some room, so that a new token does not copy those before it.

    The room is at most a quarter of what is in use. Reordered rows get new buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rooms: list[Tensor | None] = [None, None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append columns and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self._rooms[0] = _appended(self.keys, self._rooms[0], key_states)
        self.values, self._rooms[1] = _appended(self.values, self._rooms[1], value_states)
        return self.keys, self.values


def _appended(held: Tensor | None, room: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the tensor with the new columns [.., n, D], the buffer that it is the beginning of)."""
    start = held.shape[-2] if held is not None and held.numel() else 0
    stop = start + new.shape[-2]
    if held is None or room is None or not start or held.data_ptr() != room.data_ptr() or stop > room.shape[-2]:
        room = new.new_empty((*new.shape[:-2], stop + stop // 4 if start else stop, new.shape[-1]))
        if held is not None and start:
            room[..., :start, :] = held
    room[..., start:stop, :] = new
    return room[..., :stop, :], room


class StageModel:
    """The model of one stage: frozen with a LoRA adapter, or trainable as a whole."""

    def __init__(
        self,
        part: StagePart,
        config: Any,
        shell: Any,
        ends: Mapping[str, nn.Module],
        trainable: dict[str, nn.Parameter],
        content_hash: str,
        adapted: Any = None,
    ) -> None:
        """`adapted` is the peft model around `shell`, the model of the slice's layers."""
        self.part = part
        self.trainable = trainable
        """Parameters by their names in the whole model or its adapter, so that all stages together match one process."""
        self.content_hash = content_hash
        """SHA-256 of the weights as read."""
        self.width: int = config.hidden_size
        self.num_model_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self._config = config
        self._layout = layout_of(config)
        self._shell = shell
        self._adapted = adapted
        self._merged: MergedLayers | None = None
        self._is_merged = False  # whether it holds the present weights
        self._in_place = ExitStack()
        self._is_in_place = False
        self._embedding, self._norm, self._head = (ends.get(name) for name in ("embedding", "norm", "head"))
        self._decoder = getattr(shell, self._layout.decoder)
        first = next(shell.parameters())
        self.device, self.dtype = first.device, first.dtype

    @property
    def layer_prefix(self) -> str:
        """Prefix of the layer number in the names of `trainable`."""
        return self._layout.layer_prefix

    @property
    def cache_token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers of the slice."""
        config = self._config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * heads * head_size * self.part.num_layers * self.dtype.itemsize

    def mask_bytes(self, num_rows: int, num_new: int, num_past: int, *, is_padded: bool) -> int:
        """Return the bytes of the float32 mask that `run` makes over these new and past columns; 0 where it needs none.

        A mask grows with the square of the columns. It is needed for padded rows, for several columns that follow others,
        and in models with a sliding window.
        """
        config = self._shell.config
        window = getattr(config, "sliding_window", None) if getattr(config, "layer_types", None) else None
        is_masked = is_padded or num_past > 0 or (window is not None and num_new >= window)
        return 4 * num_rows * num_new * (num_past + num_new) if is_masked and num_new > 1 else 0

    def masks_bytes(self, command: ForwardCommand, max_keys: int) -> int:
        """Return the bytes of all masks of a command. Raises PipelineError where prompts and answers do not fit its row."""
        num_rows, num_columns = command.states.shape[:2]
        if (shared := command.shared) is None:
            return self.mask_bytes(num_rows, num_columns, 0, is_padded=False)
        num_prompts, num_answers, columns = len(shared.left_padding), len(shared.prompt_of), shared.prompt_columns
        per_answer, left = divmod(num_columns - shared.answers_at, max(num_answers, 1))
        if num_rows != 1 or left or min(num_prompts, num_answers, columns, per_answer) < 1:
            raise PipelineError(
                f"a row must hold whole prompts and answers, got {num_rows} of {num_columns} columns for {num_prompts} and "
                f"{num_answers}; drop the batch"
            )
        if max(shared.left_padding) >= columns or max(shared.prompt_of) >= num_prompts:
            raise PipelineError(f"answers must name one of {num_prompts} prompts of at least one token; these do not")
        if num_answers * (columns + per_answer) > max_keys:
            raise PipelineError(
                f"{num_answers} answers with their prompts must have at most {max_keys} columns together, got "
                f"{columns + per_answer} each; send smaller micro-batches"
            )
        is_padded = any(shared.left_padding)
        of_prompts = self.mask_bytes(num_prompts, columns, 0, is_padded=is_padded)
        return of_prompts + self.mask_bytes(num_answers, per_answer, columns, is_padded=is_padded)

    def new_cache(self) -> transformers.DynamicCache:
        """Return empty keys and values for the layers of the slice."""
        cache = transformers.DynamicCache(config=self._shell.config)
        cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        return cache

    def adapter_off(self) -> AbstractContextManager[None]:
        """Within this context the slice computes as the frozen base. Raises PipelineError where all of it trains."""
        if self._adapted is None and self.trainable:
            raise PipelineError(
                "the base's log-probs need a frozen base, got one that trains as a whole; set kl_coef = 0"
            )
        if self._adapted is None:
            return nullcontext()
        self._use_merged(False)
        return self._adapted.disable_adapter()

    def weights_changed(self) -> None:
        """Merge again before the next answers are sampled. Call it after every change of the trainable parameters."""
        self._is_merged = False

    def _use_merged(self, wanted: bool) -> None:
        """Switch between the adapter beside the base, which trains, and merged into it, as the engine of one process samples.

        A float32 base is merged, where there is memory for it, and once per version.
        """
        if not wanted:
            self._in_place.close()
            self._is_in_place = False
            return
        if self._merged is None:
            self._merged = MergedLayers(self._adapted, max_bytes=available_bytes(self.device) // FOLD_SHARE)
        if not self._is_merged:
            self._merged.merge()
            self._is_merged = True
        if not self._is_in_place:
            self._in_place.enter_context(self._merged.as_merged_last())
            self._is_in_place = True

    def run(
        self, states: Tensor, left_padding: Tensor | None = None, cache: transformers.DynamicCache | None = None
    ) -> Tensor:
        """Compute hidden states [B, L, W] after the slice from token ids [B, L] or hidden states [B, L, W] before it.

        `left_padding` [B] counts the leading columns, those in `cache` included, that a row must not attend to; padding on
        the right needs no mask. Positions count real tokens only. With a `cache` the adapter is merged.
        """
        if self._adapted is not None:
            self._use_merged(cache is not None)
        return self._run(states, left_padding, cache)

    def run_shared(self, states: Tensor, shared: SharedPrompts) -> Tensor:
        """Compute hidden states [1, N, W] of a row of prompts and answers; each prompt is computed once, see `SharedPrompts`.

        Answers continue a copy of their prompt's keys and values. Differentiable where grad is enabled.
        """
        if self._adapted is not None:
            self._use_merged(False)
        prompts, answers = states[0].split([shared.answers_at, states.shape[1] - shared.answers_at])
        padding, rows = (torch.tensor(values, device=self.device) for values in (shared.left_padding, shared.prompt_of))
        cache = transformers.DynamicCache(config=self._shell.config)
        of_prompts = self._run(prompts.unflatten(0, (len(padding), -1)), padding, cache)
        for layer in cache.layers:
            assert is_plain_layer(layer) and layer.keys is not None and layer.values is not None
            layer.keys, layer.values = repeated_rows(layer.keys, rows), repeated_rows(layer.values, rows)
        of_answers = self._run(answers.unflatten(0, (len(rows), -1)), padding[rows], cache)
        return torch.cat([of_prompts.flatten(0, 1), of_answers.flatten(0, 1)])[None]

    def _run(self, states: Tensor, left_padding: Tensor | None, cache: transformers.DynamicCache | None) -> Tensor:
        hidden = states.to(self.device)
        if not hidden.is_floating_point():
            if self._embedding is None:
                raise PipelineError("token ids must go to a stage with the embedding, got one without; fix the route")
            hidden = self._embedding(hidden)
        num_rows, num_new = hidden.shape[:2]
        num_past = cache.get_seq_length() if cache is not None else 0
        columns = torch.arange(num_past, num_past + num_new, device=self.device)[None].expand(num_rows, -1)
        mask = None
        if left_padding is not None and bool(left_padding.any()):
            padding = left_padding.to(self.device)[:, None]
            mask = (torch.arange(num_past + num_new, device=self.device) >= padding).long()
            columns = (columns - padding).clamp(min=0)
        return self._decoder(
            inputs_embeds=hidden.to(self.dtype),
            attention_mask=mask,
            position_ids=columns,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [.., V] from hidden states [.., W] after the last layer."""
        if self._head is None or self._norm is None:
            raise PipelineError("logits must come from a stage with the head, got one without; fix the route")
        return self._head(self._norm(hidden))

    def head(self) -> Head:
        """The head, for log-probs that are computed a chunk of tokens at a time."""
        modules = filter(None, (self._norm, self._head))
        is_trained = any(parameter.requires_grad for module in modules for parameter in module.parameters())
        return Head(self.logits, self.vocab_size, is_trained)

    def num_parameters(self) -> int:
        """Number of parameters, frozen ones included, each counted once."""
        modules = [self._shell, *filter(None, (self._embedding, self._norm, self._head))]
        return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())


def load_stage(
    folder: Path,
    part: StagePart,
    *,
    lora: LoraSection | None,
    device: torch.device,
    dtype: torch.dtype,
    content_hash: str | None = None,
) -> StageModel:
    """Read the tensors of `part` and nothing else. Without `lora` all of them train.

    The adapter has the names and the initial values of the whole model: A from seed and name, B zero. A tied head is the
    embedding itself where one stage has both, else a replica: the driver adds up the gradients of all copies and every
    holder applies the sum, so they stay equal. With `content_hash` the weights must have this hash. Raises PipelineError
    (unknown architecture, absent or other weights, no such layers) and PolicyError.
    """
    if lora is not None and lora.dropout:
        raise PipelineError(
            f"a pipelined adapter must have no dropout, got policy.lora.dropout = {lora.dropout}; set it to 0"
        )
    config = read_config(folder)
    layout = layout_of(config)
    if not 0 <= part.start < part.stop <= config.num_hidden_layers:
        raise PipelineError(
            f"a stage must hold some of {config.num_hidden_layers} layers, got [{part.start}, {part.stop}); assign others"
        )
    shell, ends = _skeleton(config, layout, part)
    reader = WeightReader(folder)
    read_hash = _fill(shell, ends, reader, config=config, layout=layout, device=device, dtype=dtype)
    if content_hash is not None and read_hash != content_hash:
        raise PipelineError(
            f"weights of a stage must have the hash {content_hash}, got {read_hash} in {folder}; fetch the model again"
        )
    switch_dropout_off(shell)
    shell.eval().requires_grad_(lora is None)
    for module in ends.values():
        module.eval().requires_grad_(lora is None)
    adapted = None if lora is None else _adapted(shell, folder, part, lora=lora)
    if lora is None:
        trainable = _all_parameters(shell, ends, config, layout=layout)
    else:
        trainable = {} if adapted is None else dict(adapter_parameters(adapted))
    return StageModel(part, config, shell, ends=ends, trainable=trainable, content_hash=read_hash, adapted=adapted)


def _adapted(shell: Any, folder: Path, part: StagePart, *, lora: LoraSection) -> Any:
    """The peft model around `shell`, or None where no layer of the stage has an adapter."""
    prefixes = part.name_prefixes(layout_of(shell.config).layer_prefix)
    targets = tuple(name for name, _, _ in adapter_targets(folder, lora) if name.startswith(prefixes))
    if not targets:
        return None
    with quiet_libraries():
        return attach_adapter(shell, lora.model_copy(update={"targets": targets})).eval()


def _skeleton(config: Any, layout: Layout, part: StagePart) -> tuple[Any, dict[str, nn.Module]]:
    """Build (model of the slice's layers, its ends) without weights."""
    sliced = copy.deepcopy(config)
    sliced.num_hidden_layers = part.num_layers
    if getattr(sliced, "layer_types", None):
        sliced.layer_types = config.layer_types[part.start : part.stop]
    sliced.tie_word_embeddings = False
    shell = on_meta(sliced, layout)
    decoder = getattr(shell, layout.decoder)
    named = nn.ModuleList()
    for offset, layer in enumerate(getattr(decoder, layout.layers)):
        named.add_module(str(part.start + offset), layer)  # the number it has in the whole model
    setattr(decoder, layout.layers, named)
    ends = {"embedding": getattr(decoder, layout.embedding)} if part.has_embedding else {}
    if part.has_head:
        ends |= {"norm": getattr(decoder, layout.norm), "head": getattr(shell, layout.head)}
    for owner, name in ((decoder, layout.embedding), (decoder, layout.norm), (shell, layout.head)):
        setattr(owner, name, nn.Identity())
    return shell, ends


def _fill(
    shell: Any,
    ends: Mapping[str, nn.Module],
    reader: WeightReader,
    config: Any,
    layout: Layout,
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Replace the meta tensors by weights; returns the hash of the weights."""
    own = {name: name for name in shell.state_dict()}
    of_ends = {
        key: {suffix: f"{name}.{suffix}" for suffix in ends[key].state_dict()}
        for key, name in _end_names(config, layout).items()
        if key in ends
    }
    renamed = _file_names(reader, layout)
    wanted = [renamed.get(name, name) for names in (own, *of_ends.values()) for name in names.values()]
    tensors, digest = reader.read(wanted)
    for module, names in ((shell, own), *((ends[key], names) for key, names in of_ends.items())):
        found = {key: tensors[renamed.get(name, name)].to(device, dtype, copy=True) for key, name in names.items()}
        try:
            module.load_state_dict(found, assign=True)
        except RuntimeError as error:
            raise PipelineError(
                f"a stage's weights must have the shapes of config.json, got {' '.join(str(error).split())[:200]}; "
                "fetch the model again"
            ) from None
    if config.tie_word_embeddings and {"embedding", "head"} <= set(ends):
        ends["head"].weight = ends["embedding"].weight
    decoder = getattr(shell, layout.decoder)
    rotary = type(getattr(decoder, layout.rotary))  # its frequencies are computed, not stored
    setattr(decoder, layout.rotary, rotary(config=shell.config).to(device))
    return digest


def _end_names(config: Any, layout: Layout) -> dict[str, str]:
    embedding = f"{layout.decoder}.{layout.embedding}"
    head = embedding if config.tie_word_embeddings else layout.head
    return {"embedding": embedding, "norm": f"{layout.decoder}.{layout.norm}", "head": head}


def _file_names(reader: WeightReader, layout: Layout) -> dict[str, str]:
    """Return {name in the model: name in the files} where they differ."""
    new, old = f"{layout.head}.weight", f"{layout.old_head}.weight"
    return {new: old} if old in reader.names() else {}


def _all_parameters(shell: Any, ends: Mapping[str, nn.Module], config: Any, layout: Layout) -> dict[str, nn.Parameter]:
    found = dict(shell.named_parameters())
    for key, name in _end_names(config, layout).items():
        if key in ends:
            found |= {f"{name}.{suffix}": parameter for suffix, parameter in ends[key].named_parameters()}
    return found
