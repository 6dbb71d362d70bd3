"""Records: what a preparation starts from: read, parsed, cleaned of copies and of evaluation text, and sampled."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from eagle3lib import conversations, overlap, sources
from eagle3lib.accounting import Accounting
from eagle3lib.conversations import Drop, Record
from eagle3lib.errors import Eagle3Error
from eagle3lib.options import Options
from eagle3lib.progress import tqdm
from eagle3lib.replay import questions
from eagle3lib.seen import Seen

BROKEN = "line or row cannot be read"
DUPLICATE = "duplicate"
NEAR_DUPLICATE = "near duplicate"
OVERLAP = "shares 8 words in a row with an evaluation set"


@dataclass(frozen=True)
class Item:
    """One usable record and where it came from."""

    record: Record
    source: str
    where: str
    part: int = 0  # which source of the mix


class Loaded:
    """The usable records: a sample that is in memory, or, with max_prompts=0, read from the source each time."""

    def __init__(self, options: Options, items: list[Item] | None = None, accounting: Accounting | None = None):
        self.options, self._items, self._accounting = options, items, accounting

    @property
    def size(self) -> int | None:
        """How many usable records; None when only reading them all would tell."""
        return None if self._items is None else len(self._items)

    def items(self, accounting: Accounting) -> Iterator[Item]:
        """The records; what was read and dropped on the way is added to `accounting`, which must be empty."""
        if self._items is None or self._accounting is None:
            yield from _read(self.options, accounting)
            return
        before = self._accounting.copy()
        accounting.sources, accounting.examples = before.sources, before.examples
        yield from self._items

    def __repr__(self) -> str:
        if self._items is None or self._accounting is None:
            return f"all records of {self.options.prompts}"
        return f"{len(self._items):,} of {self._accounting.total.records_read:,} records of {self.options.prompts}"


def load(options: Options) -> Loaded:
    """Read, parse, clean and sample the records. Raises Eagle3Error: no such source, a broken file (with its line), or
    nothing left, with the table of reasons."""
    for part in options.mix():
        sources.read(part.name)  # a wrong name is told now, not hours later
    if not options.max_prompts:
        return Loaded(options)
    accounting = Accounting()
    items = _sample(tqdm(_read(options, accounting), desc="read", unit=" records", mininterval=1), options, accounting)
    if not items:
        raise nothing_left(options, accounting)
    return Loaded(options, items, accounting)


def _raws(options: Options) -> Iterator[tuple[int, sources.Raw]]:
    """(number of the source, record as it stands there)."""
    mix = options.mix()
    names = sources.names_of(part.name for part in mix)
    for number, part in enumerate(mix):
        for raw in itertools.islice(sources.read(part.name, names), part.cap):
            yield number, raw


def _read(options: Options, accounting: Accounting) -> Iterator[Item]:
    clean = _Cleaner(options)
    for part, raw in _raws(options):
        accounting.of(raw.source).records_read += 1
        try:
            record = conversations.parse(_readable(raw, options))
            if options.answer == "target":
                record = questions(record)
            clean.require(record)
        except Drop as drop:
            accounting.drop(raw.source, drop.reason, raw.where, drop.detail)
            continue
        yield Item(record, raw.source, raw.where, part)


def _readable(raw: sources.Raw, options: Options) -> Any:
    if not raw.broken:
        return raw.value
    if options.broken_records == "stop":
        raise Eagle3Error(f"{raw.where}: {raw.broken}; repair or remove that record, or set broken_records to \"drop\"")
    raise Drop(BROKEN, raw.broken)


class _Cleaner:
    """Drops what was there before, what is nearly the same, and what belongs to an evaluation set."""

    def __init__(self, options: Options):
        self._runs = overlap.Runs.of_evalsets() if options.decontaminate else None
        self._near = overlap.NearDuplicates(options.near_duplicates) if options.near_duplicates else None
        # Without a sample there may be very many records; then build finds the duplicates among their rows.
        self._seen = Seen() if options.max_prompts or options.near_duplicates else None

    def require(self, record: Record) -> None:
        if self._seen is not None and not self._seen.add(record.canonical.encode()):
            raise Drop(DUPLICATE)
        if self._runs and (shared := next(filter(None, map(self._runs.meets, record.texts)), "")):
            raise Drop(OVERLAP, repr(shared))
        if self._near and record.texts and self._near.meets("\n".join(record.texts)):
            raise Drop(NEAR_DUPLICATE)


def _sample(items: Iterable[Item], options: Options, accounting: Accounting) -> list[Item]:
    """The max_prompts items whose seeded content hash is smallest: the same whatever their order. With shares, the same
    within each source; where one has too few, the mix gets smaller and keeps its proportions."""
    shares = [part.share for part in options.mix()]
    heaps = [_Smallest(options.max_prompts if share is None else round(options.max_prompts * share)) for share in shares]
    if shares[0] is None:
        heaps = heaps[:1] * len(heaps)  # one for all
    for item in items:
        rank = xxhash.xxh3_128_intdigest(item.record.canonical.encode(), seed=options.seed)
        _not_sampled(heaps[item.part].push(rank, item), accounting)
    if shares[0] is None:
        return heaps[0].sorted()
    scale = min((len(heap) / heap.most for heap in heaps if heap.most), default=0.0)
    for heap in heaps:
        while len(heap) > round(heap.most * scale):
            _not_sampled(heap.pop(), accounting)
    return [item for heap in heaps for item in heap.sorted()]


def _not_sampled(item: Item | None, accounting: Accounting) -> None:
    if item is not None:
        accounting.of(item.source).not_sampled += 1


class _Smallest:
    """The `most` items of smallest rank."""

    def __init__(self, most: int):
        self.most, self._number = most, itertools.count()
        self._heap: list[tuple[int, int, Item]] = []  # the largest rank comes out first; the number keeps items from being compared

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, rank: int, item: Item) -> Item | None:
        """Take an item in; returns the one that has no place any more."""
        heapq.heappush(self._heap, (-rank, next(self._number), item))
        return self.pop() if len(self) > self.most else None

    def pop(self) -> Item:
        return heapq.heappop(self._heap)[2]

    def sorted(self) -> list[Item]:
        return [item for _, _, item in sorted(self._heap, key=lambda entry: -entry[0])]


def nothing_left(options: Options, accounting: Accounting) -> Eagle3Error:
    return Eagle3Error("\n".join([f"no conversations left of {options.prompts!r}; what became of the records:", *accounting.lines()]))
