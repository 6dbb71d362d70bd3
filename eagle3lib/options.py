"""Options: everything that decides what the prepared rows are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eagle3lib import places, sources
from eagle3lib.errors import ParamError


@dataclass(frozen=True)
class Part:
    """One source of the mix. cap: at most its first so many records; share: of the prompts used, 0..1."""

    name: str
    cap: int | None = None
    share: float | None = None


@dataclass(frozen=True)
class Options:
    """Everything that decides what the rows are; stored with them. Raises ParamError on a value out of range.

    prompts: "chitchat", a file, folder, glob or hub name; or a list of them, each perhaps with "@cap" (its first so
    many records), or all of them with "@share%" (that share of the max_prompts comes from it). max_prompts: 0 for all,
    else a sample that depends on content and seed, not on order. answer: "target" lets the target reply, "data" keeps
    the replies in the data. truncated: "keep" or "drop" replies that were cut at max_new_tokens. near_duplicates: 0 for
    off, else the similarity (0.8, say) from which a record counts as a copy of an earlier one. train_turns: "all" or
    "last". train_thinking: train what stands before </think>. broken_records: "stop" at the first line or row that cannot be
    read, or "drop" and count them. temperature, sampling_seed: of the target's answers.
    """

    prompts: str | list[str] = sources.CHITCHAT
    max_prompts: int = 256
    answer: str = "target"
    max_new_tokens: int = 96
    max_tokens: int = 1024
    heldout_share: float = 0.05
    seed: int = 0
    concurrency: int = 64  # decides speed, not content
    temperature: float = 0.0
    sampling_seed: int = 0
    truncated: str = "keep"
    train_turns: str = "all"
    train_thinking: bool = True
    decontaminate: bool = True
    near_duplicates: float = 0.0
    broken_records: str = "stop"

    def __post_init__(self) -> None:
        _one_of("answer", self.answer, ("target", "data"))
        _one_of("truncated", self.truncated, ("keep", "drop"))
        _one_of("train_turns", self.train_turns, ("all", "last"))
        _one_of("broken_records", self.broken_records, ("stop", "drop"))
        for name, least in (("max_prompts", 0), ("max_new_tokens", 2), ("max_tokens", 8), ("concurrency", 1)):
            if getattr(self, name) < least:
                raise ParamError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 <= self.heldout_share < 1:
            raise ParamError(f"heldout_share is {self.heldout_share}; it must be at least 0 and less than 1")
        if not 0 <= self.near_duplicates <= 1:
            raise ParamError(f"near_duplicates is {self.near_duplicates}; it must be 0 (off) or a similarity up to 1")
        if not 0 <= self.temperature <= 2:
            raise ParamError(f"temperature is {self.temperature}; it must be between 0 and 2")
        self.mix()

    @property
    def sampling(self) -> dict[str, Any]:
        """What the server is told about how to write. A seed means nothing to greedy decoding."""
        seed = {"sampling_seed": self.sampling_seed} if self.temperature else {}
        return {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens, **seed}

    def mix(self) -> list[Part]:
        """The sources with their caps or shares. ParamError when they do not fit together."""
        parts = [_part(one) for one in ([self.prompts] if isinstance(self.prompts, str) else self.prompts)]
        if not parts:
            raise ParamError("prompts is an empty list; name at least one source")
        shares = [part.share for part in parts if part.share is not None]
        if not shares:
            return parts
        if len(shares) < len(parts) or abs(sum(shares) - 1) > 0.005:
            raise ParamError(f"prompts {self.prompts}: shares are for all sources or none, and must sum to 100 % (here {sum(shares):.1%})")
        if not self.max_prompts:
            raise ParamError("prompts with shares need max_prompts: the number of prompts that they are shares of")
        return parts

    def content(self) -> dict[str, Any]:
        """The options that decide the rows."""
        return {key: value for key, value in asdict(self).items() if key != "concurrency"}


def _part(text: str) -> Part:
    """A source with "@cap" or "@share%" behind it; a file whose own name ends like that is that file."""
    name, at, tail = text.rpartition("@")
    if not at or places.located(text).exists():
        return Part(text)
    if tail.isdecimal():
        return Part(name, cap=int(tail))
    if tail.endswith("%"):
        try:
            share = float(tail[:-1]) / 100
        except ValueError:
            return Part(text)
        if not 0 <= share <= 1:
            raise ParamError(f"prompts {text!r}: a share is at least 0 % and at most 100 %")
        return Part(name, share=share)
    return Part(text)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ParamError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
