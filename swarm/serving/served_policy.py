"""The trained policy of a node's folder, ready to be asked, and with its newest checkpoint if that is wished."""

import asyncio
import logging
from typing import Self

from swarm.api.saved_policy import load_newest_into, newest_round
from swarm.config import BUNDLED_BASES, Config
from swarm.errors import SwarmError
from swarm.policy.base_folder import fitted_to_base, max_positions
from swarm.policy.policy import Policy
from swarm.serving.service import AnswerService
from swarm.serving.texts import PromptTexts
from swarm.tasks.prompted_source import shared_context

logger = logging.getLogger(__name__)

_RELOAD_INTERVAL_S = 5.0


class ServedPolicy:
    """A policy with the thread that samples from it. It is a context manager of the loop that asks."""

    def __init__(
        self, policy: Policy, config: Config, round: int, *, context: int, max_answers: int, with_base: bool
    ) -> None:
        """`round`: of the policy's checkpoint. A prompt with its answer has at most `context` tokens, or what the base allows.

        `with_base`: its base can be asked, too. At most `max_answers` are open at a time.
        """
        self.policy = policy
        self.config = fitted_to_base(config)
        self.round = round
        self.with_base = with_base
        most = min(context, max_positions(policy.base_folder) or context)
        self.service = AnswerService(policy, self.config, max_tokens=most, max_answers=max_answers, with_base=with_base)
        is_own = config.policy.base in BUNDLED_BASES
        self.texts = PromptTexts(policy, shared_context(config.tasks.sources), is_own=is_own)

    async def __aenter__(self) -> Self:
        """Raises SwarmError where the memory holds no answers."""
        await self.service.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.texts.close()
        await self.service.stop()

    async def follow(self) -> None:
        """Take newer checkpoints as the node writes them, until cancelled. Answers under way end with the weights they have.

        A checkpoint that turns out to be damaged is tried once.
        """
        tried = self.round
        while True:
            await asyncio.sleep(_RELOAD_INTERVAL_S)
            newest = await asyncio.to_thread(newest_round, self.config)
            if newest is not None and newest != tried:
                tried = newest
                self.service.between_answers(self._reload)

    def _reload(self) -> None:
        """On the compute thread."""
        try:
            self.round = load_newest_into(self.policy, self.config)
        except SwarmError as error:
            logger.warning("the policy stays that of round %d: %s", self.round, error)
        else:
            logger.warning("the policy is now that of round %d", self.round)
