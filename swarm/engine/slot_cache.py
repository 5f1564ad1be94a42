"""The cache of continuous batching: keys and values of answers that start and end at different times.

Memory follows the tokens in use. Answers of similar length share a bucket, whose buffers are a little wider than its longest
answer; when that outgrows them, the bucket's answers move to wider ones. Answers to one long prompt share its keys and values.

    prefix p   [ prompt                     ]   computed once, read by all answers of a group
    bucket 0   [ answer a | answer a so far  | free ]       a token's column is its position after the prefix,
    bucket 1   [ answer b | free ]                          so no row needs padding

Rows 0 to n - 1 of a forward pass are the active answers ("slots"). When one ends, the last one takes its number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from swarm.engine.slot_attention import Part, StepLayout, attend

_NARROW = 128
"""Columns that every bucket has, as far as its answers may become that long: narrower ones would be widened too often."""
_SPARE_COLUMNS = 64
_SPARE_SHARE = 8
"""A wider bucket gets 64 free columns, or 1/8 of its longest answer. Moving costs about four steps of attention."""
_SIMILAR = 0.75
"""Answers share a bucket if the shorter one needs at least this part of the longer one's columns."""
_MOST_BUCKETS = 6
"""Each bucket costs calls of attention in every layer. With more of them, all answers are divided anew."""


@dataclass(slots=True, eq=False)
class SharedPrefix:
    """Keys and values of a prompt that several answers read."""

    length: int
    cache: DynamicCache | None = None
    """[1, heads, length, head size] by layer, once computed."""
    logits: Tensor | None = None
    """[V] of the token after it."""


@dataclass(slots=True, eq=False)
class CachedAnswer:
    """What the cache knows of one active answer."""

    length: int
    """Tokens stored, without those of the prefix."""
    limit: int
    """Most tokens that it may store."""
    prefix: SharedPrefix | None = None

    @property
    def columns(self) -> int:
        """Columns to give to it when it moves."""
        spare = max(_SPARE_COLUMNS, self.length // _SPARE_SHARE)
        return max(1, min(self.limit, max(_NARROW, self.length + spare)))


@dataclass(slots=True, eq=False)
class Bucket:
    """Answers of similar length. The first rows of its buffers are in use."""

    num_rows: int
    width: int
    slots: list[int]
    """By row."""
    buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values [num_rows, heads, width, head size] by layer."""

    @property
    def num_places(self) -> int:
        return self.num_rows * self.width

    def remove(self, slot: int, length_of_last: int) -> None:
        """Move the last row, with so many tokens, to the row of `slot`."""
        row, last = self.slots.index(slot), len(self.slots) - 1
        if row != last:
            for buffers in self.buffers:
                for buffer in buffers:
                    buffer[row, :, :length_of_last] = buffer[last, :, :length_of_last]
        self.slots[row] = self.slots[last]
        self.slots.pop()


class SlotCache(Cache):
    """A transformers cache whose rows are at different positions."""

    def __init__(
        self, like: DynamicCache, num_slots: int, max_places: int, *, splits: bool, windows: Sequence[int | None]
    ) -> None:
        """Holds at most `num_slots` answers, in layers shaped as in `like`, and aims at `max_places` tokens in all.

        Without `splits` there is one bucket and no prefix, for models whose attention cannot be computed in parts. `windows`
        are the sliding windows of the model's layers.
        """
        self.slot_layers = [_SlotLayer(self, index, layer) for index, layer in enumerate(like.layers)]
        super().__init__(layers=list[Any](self.slot_layers))
        keys = self.slot_layers[0].like[0]
        self.device, self.dtype = keys.device, keys.dtype
        self.splits = splits
        self.answers: list[CachedAnswer] = []
        """By slot."""
        self.buckets: list[Bucket] = []
        self.slots = torch.arange(num_slots, device=self.device)
        self.positions = torch.zeros_like(self.slots)
        """Position [S] of each slot's next token."""
        self.starts = torch.zeros_like(self.slots)
        """Length [S] of each slot's prefix."""
        self.step_layout: StepLayout | None = None
        """Of the present step, where attention is computed in parts."""
        self.width = 0
        """Columns that the present step uses, where all answers are in one bucket."""
        self.num_split = 0
        """Layers of the present step whose attention was computed in parts."""
        self.max_places = max_places
        self.windows = windows
        self._spare: Bucket | None = None

    @property
    def is_whole(self) -> bool:
        """Whether slot i is row i of the only bucket, and nothing else is read."""
        return (
            len(self.buckets) == 1
            and self.buckets[0].slots == list(range(len(self.answers)))
            and not any(answer.prefix for answer in self.answers)
        )

    def add(self, answers: Sequence[CachedAnswer]) -> None:
        """Make slots for `answers`, whose keys and values `fill` copies."""
        first = len(self.answers)
        self.answers += answers
        for slot, answer in enumerate(answers, first):
            self.starts[slot] = answer.prefix.length if answer.prefix else 0
            self.positions[slot] = self.starts[slot] + answer.length
        outside = [slot for slot in range(first, len(self.answers)) if not self._joins(slot)]
        if outside:
            self._divide([], outside)

    def fill(self, slot: int, source: DynamicCache, row: int, start: int) -> None:
        """Copy the tokens of an answer from a row of `source`, from column `start` on."""
        bucket = next(bucket for bucket in self.buckets if slot in bucket.slots)
        place, length = bucket.slots.index(slot), self.answers[slot].length
        for (keys, values), layer in zip(bucket.buffers, source.layers, strict=True):
            keys[place, :, :length] = layer.keys[row, :, start : start + length]  # type: ignore[index]
            values[place, :, :length] = layer.values[row, :, start : start + length]  # type: ignore[index]

    def copy(self, slot: int) -> DynamicCache:
        """Return a copy of the tokens of an answer, without its prefix: [1, heads, length, head size] by layer."""
        bucket = next(bucket for bucket in self.buckets if slot in bucket.slots)
        place, length = bucket.slots.index(slot), self.answers[slot].length
        found = DynamicCache()
        for index, (keys, values) in enumerate(bucket.buffers):
            found.update(keys[None, place, :, :length].clone(), values[None, place, :, :length].clone(), index)
        return found

    def remove(self, slot: int) -> None:
        """Forget the answer of a slot. The last slot takes its number."""
        last = len(self.answers) - 1
        bucket = next(bucket for bucket in self.buckets if slot in bucket.slots)
        bucket.remove(slot, self.answers[bucket.slots[-1]].length)
        if not bucket.slots:
            self.buckets.remove(bucket)
            self._spare = bucket if not self.buckets else None
        if slot != last:
            moved = next(bucket for bucket in self.buckets if last in bucket.slots)
            moved.slots[moved.slots.index(last)] = slot
            self.positions[slot], self.starts[slot] = self.positions[last], self.starts[last]
            self.answers[slot] = self.answers[last]
        self.answers.pop()

    def full_buckets(self) -> list[Bucket]:
        """Buckets in which an answer has no column for its next token."""
        return [b for b in self.buckets if any(self.answers[slot].length >= b.width for slot in b.slots)]

    def widen(self) -> None:
        """Give every answer a column for its next token."""
        full = self.full_buckets()
        if full:
            self._divide(full, [])

    def shrink(self) -> None:
        """Free the rows of ended answers, where they are a quarter of a bucket or more."""
        loose = [bucket for bucket in self.buckets if 4 * len(bucket.slots) <= 3 * bucket.num_rows]
        if loose:
            self._divide(loose, [])

    def places(self, more: Sequence[CachedAnswer] = ()) -> int:
        """Tokens for which memory is needed if all answers, and `more`, are divided anew. Prefixes are included."""
        answers = [*self.answers, *more]
        return _prefix_places(answers) + _places_of(self._groups(dict(enumerate(answers))))

    def num_bytes(self) -> int:
        """Memory of keys and values, prefixes included."""
        prefixes = {id(answer.prefix): answer.prefix for answer in self.answers if answer.prefix}
        held = [*self.buckets, *([self._spare] if self._spare else [])]
        own = (tensor for bucket in held for pair in bucket.buffers for tensor in pair)
        shared = sum(bytes_of(prefix.cache) for prefix in prefixes.values() if prefix.cache)
        return shared + sum(tensor.untyped_storage().nbytes() for tensor in own)

    def clear(self) -> None:
        """Forget all answers. Buffers of a single bucket stay for the next ones."""
        self._spare = self.buckets[0] if len(self.buckets) == 1 else self._spare
        self.buckets, self.answers = [], []

    def resize(self, num_slots: int, max_places: int) -> None:
        """Prepare an empty cache for another call."""
        self.slots = torch.arange(num_slots, device=self.device)
        self.positions, self.starts = torch.zeros_like(self.slots), torch.zeros_like(self.slots)
        self.max_places = max_places

    def begin_step(self, *, in_parts: bool = False) -> None:
        """Arrange one forward pass over the next token of every slot, `in_parts` even if one part would do."""
        self.width = max(answer.length for answer in self.answers) + 1
        self.step_layout = self._layout() if in_parts or not self.is_whole else None
        self.num_split = 0

    def end_step(self) -> None:
        """Count the token that the pass has stored for every slot."""
        self.positions[: len(self.answers)] += 1
        for answer in self.answers:
            answer.length += 1

    def _joins(self, slot: int) -> bool:
        """Put a slot into the narrowest bucket with a free row, if one is neither too narrow nor much too wide."""
        answer = self.answers[slot]
        fitting = [
            bucket
            for bucket in self.buckets
            if len(bucket.slots) < bucket.num_rows
            and answer.length < bucket.width <= max(2 * _NARROW, round(answer.columns / _SIMILAR))
        ]
        if fitting:
            bucket = min(fitting, key=lambda bucket: bucket.width)
            bucket.slots.append(slot)
        return bool(fitting)

    def _divide(self, old: list[Bucket], more: Sequence[int]) -> None:
        """Replace the buckets `old` by such as fit, also for the slots `more`. One layer is copied at a time."""
        stay = [bucket for bucket in self.buckets if bucket not in old]
        groups = self._groups(self._members(old, more))
        places = sum(bucket.num_places for bucket in stay) + _places_of(groups) + _prefix_places(self.answers)
        if stay and (not self.splits or len(stay) + len(groups) > _MOST_BUCKETS or places > self.max_places):
            old, stay = self.buckets, []
            groups = self._groups(self._members(old, more))
        new = [Bucket(len(slots), width, slots) for width, slots in groups]
        source = {slot: (bucket, row) for bucket in old for row, slot in enumerate(bucket.slots)}
        self.buckets = [*stay, *new]
        largest = max(new, key=lambda one: one.num_places)  # it alone reuses memory: two would overwrite each other
        for layer in self.slot_layers:
            for bucket in new:
                bucket.buffers.append(layer.buffers(bucket, self._spare if bucket is largest else None))
                for row, slot in enumerate(bucket.slots):
                    if slot in source:
                        other, other_row = source[slot]
                        length = self.answers[slot].length
                        for target, origin in zip(bucket.buffers[-1], other.buffers[layer.index], strict=True):
                            target[row, :, :length] = origin[other_row, :, :length]
            for bucket in old:
                bucket.buffers[layer.index] = layer.like  # frees the memory before the next layer is copied
            if self._spare is not None:
                self._spare.buffers[layer.index] = layer.like
        self._spare = None

    def _layout(self) -> StepLayout:
        def on_device(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, device=self.device)

        columns = self.positions[: len(self.answers)] - self.starts[: len(self.answers)]
        parts = [
            Part(index := on_device(b.slots), columns[index], max(self.answers[slot].length for slot in b.slots) + 1)
            for b in self.buckets
        ]
        readers: dict[int, list[int]] = {}
        prefixes: dict[int, DynamicCache] = {}
        for slot, answer in enumerate(self.answers):
            if answer.prefix is not None:
                assert answer.prefix.cache is not None
                readers.setdefault(id(answer.prefix), []).append(slot)
                prefixes[id(answer.prefix)] = answer.prefix.cache
        return StepLayout(
            parts,
            on_device([slot for bucket in self.buckets for slot in bucket.slots]).argsort(),
            [(prefixes[key], len(slots)) for key, slots in readers.items()],
            on_device([slot for slots in readers.values() for slot in slots]),
            self.positions,
        )

    def _members(self, buckets: Iterable[Bucket], more: Sequence[int]) -> dict[int, CachedAnswer]:
        slots = sorted([*more, *(slot for bucket in buckets for slot in bucket.slots)])
        return {slot: self.answers[slot] for slot in slots}

    def _groups(self, answers: Mapping[int, CachedAnswer]) -> list[tuple[int, list[int]]]:
        """Divide answers into (width, slots) of similar length."""
        groups: list[tuple[int, list[int]]] = []
        for slot in sorted(answers, key=lambda slot: -answers[slot].columns):
            columns = answers[slot].columns
            if groups and (not self.splits or groups[-1][0] <= 2 * _NARROW or columns >= _SIMILAR * groups[-1][0]):
                groups[-1][1].append(slot)
            else:
                groups.append((columns, [slot]))
        return [(width, sorted(slots)) for width, slots in groups]


def chained(first: DynamicCache | None, second: DynamicCache) -> DynamicCache:
    """Return the tokens of both [1, heads, length, head size], one after the other."""
    if first is None:
        return second
    found = DynamicCache()
    for part in (first, second):
        for index, layer in enumerate(part.layers):
            found.update(layer.keys, layer.values, index)  # type: ignore[arg-type]
    return found


def bytes_of(cache: DynamicCache) -> int:
    """Memory of keys and values."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)  # type: ignore[union-attr]


def _places_of(groups: Iterable[tuple[int, Sequence[int]]]) -> int:
    return sum(width * len(slots) for width, slots in groups)


def _prefix_places(answers: Iterable[CachedAnswer]) -> int:
    return sum({id(answer.prefix): answer.prefix.length for answer in answers if answer.prefix}.values())


class _SlotLayer(CacheLayerMixin):
    """One layer of the cache. `update` writes one token per slot."""

    is_sliding = False

    def __init__(self, cache: SlotCache, index: int, like: Any) -> None:
        super().__init__()
        self.index = index
        self.like: tuple[Tensor, Tensor] = (like.keys[:0], like.values[:0])
        """Empty keys and values of the layer's shape and type."""
        self._cache = cache
        self.is_initialized = True

    def buffers(self, bucket: Bucket, spare: Bucket | None) -> tuple[Tensor, Tensor]:
        """Make keys and values for a bucket, in the memory of `spare` where that is large enough."""
        kept = spare.buffers[self.index] if spare is not None else self.like
        keys, values = (_buffer(like, bucket, old.untyped_storage()) for like, old in zip(self.like, kept, strict=True))
        return keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing; the buffers exist already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cache, num_rows = self._cache, key_states.shape[0]
        if cache.step_layout is not None:
            for bucket, part in zip(cache.buckets, cache.step_layout.parts, strict=True):
                keys, values = bucket.buffers[self.index]
                rows = cache.slots[: len(part.slots)]
                keys[rows, :, part.columns] = key_states[part.slots, :, 0]
                values[rows, :, part.columns] = value_states[part.slots, :, 0]
            key_states.slot_layer = self  # type: ignore[attr-defined]  # tells attention where the other tokens are
            return key_states, value_states
        keys, values = cache.buckets[0].buffers[self.index]
        rows, columns = cache.slots[:num_rows], cache.positions[:num_rows]
        keys[rows, :, columns] = key_states[:, :, 0]
        values[rows, :, columns] = value_states[:, :, 0]
        return keys[:num_rows, :, : cache.width], values[:num_rows, :, : cache.width]

    def window_of(self, module_index: int) -> int | None:
        """Sliding window of a layer of the model, which may read the keys of another one."""
        return self._cache.windows[module_index]

    def attend(self, query: Tensor, window: int | None, scale: float) -> Tensor:
        """Return attention [n, 1, heads, head size] of queries [n, heads, 1, head size] over all parts."""
        layout = self._cache.step_layout
        assert layout is not None
        self._cache.num_split += 1
        num_rows, num_heads = query.shape[:2]
        num_key_heads = self.like[0].shape[1]
        grouped = query.reshape(num_rows, num_key_heads, num_heads // num_key_heads, -1)
        found: list[tuple[Tensor, Tensor]] = []
        for bucket, part, mask in zip(
            self._cache.buckets, layout.parts, layout.masks_of(window, query.dtype), strict=True
        ):
            keys, values = (states[: len(part.slots), :, : part.width] for states in bucket.buffers[self.index])
            found.append(attend(grouped[part.slots], keys, values, mask, scale))
        attended, lse = (torch.cat(states)[layout.order] for states in zip(*found, strict=True))
        if layout.prefixes:
            self._add_prefixes(attended, lse, grouped, layout.prefix_masks_of(window, query.dtype), scale=scale)
        return attended.reshape(num_rows, 1, num_heads, -1)

    def _add_prefixes(
        self, attended: Tensor, lse: Tensor, grouped: Tensor, masks: Sequence[Tensor | None], *, scale: float
    ) -> None:
        """Merge attention over the prefixes into `attended` [n, key heads, queries per key head, size] in place."""
        layout = self._cache.step_layout
        assert layout is not None
        counts = [count for _, count in layout.prefixes]
        found: list[tuple[Tensor, Tensor]] = []
        for (prefix, count), queries, mask in zip(
            layout.prefixes, grouped[layout.readers].split(counts), masks, strict=True
        ):
            layer, (_, heads, repeats, size) = prefix.layers[self.index], queries.shape
            together = queries.transpose(0, 1).reshape(1, heads, count * repeats, size)
            if mask is not None:
                mask = mask[:, 0, 0].repeat_interleave(repeats, 0)[None, None]
            states, sums = attend(together, layer.keys, layer.values, mask, scale)  # type: ignore[arg-type]
            by_answer = states.reshape(heads, count, repeats, -1).transpose(0, 1)
            found.append((by_answer, sums.reshape(heads, count, repeats).transpose(0, 1)))
        over_prefixes, prefix_lse = (torch.cat(states) for states in zip(*found, strict=True))
        weight = (prefix_lse - lse[layout.readers]).sigmoid()[..., None].to(attended.dtype)
        attended[layout.readers] = torch.lerp(attended[layout.readers], over_prefixes, weight)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.width, 0

    def get_seq_length(self) -> int:
        return self._cache.width - 1

    def get_max_length(self) -> int:
        return -1


def _buffer(like: Tensor, bucket: Bucket, storage: torch.UntypedStorage) -> Tensor:
    shape = (bucket.num_rows, like.shape[1], bucket.width, like.shape[3])
    if storage.nbytes() >= like.element_size() * bucket.num_places * shape[1] * shape[3]:
        return like.new_empty(0).set_(storage, 0, shape)  # type: ignore[arg-type]
    return like.new_zeros(shape)  # masked values are still multiplied by 0, and the product must not be NaN
