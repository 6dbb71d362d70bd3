"""Options: everything that decides what the prepared rows are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eagle3lib import sources
from eagle3lib.errors import ParamError


@dataclass(frozen=True)
class Options:
    """Everything that decides what the rows are; stored with them. Raises ParamError on a value out of range.

    prompts: "chitchat", a file, folder, glob or hub name; or a list of them, each perhaps with "@cap" (at most so
    many records of it). max_prompts: 0 for all, else a sample that depends on content and seed, not on order.
    answer: "target" lets the target reply, "data" keeps the replies in the data. truncated: "keep" or "drop" replies
    that were cut at max_new_tokens. near_duplicates: 0 for off, else the similarity (0.8, say) from which a record
    counts as a copy of an earlier one. train_turns: "all" or "last". train_thinking: train what stands before </think>.
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
    truncated: str = "keep"
    train_turns: str = "all"
    train_thinking: bool = True
    decontaminate: bool = True
    near_duplicates: float = 0.0

    def __post_init__(self) -> None:
        _one_of("answer", self.answer, ("target", "data"))
        _one_of("truncated", self.truncated, ("keep", "drop"))
        _one_of("train_turns", self.train_turns, ("all", "last"))
        for name, least in (("max_prompts", 0), ("max_new_tokens", 2), ("max_tokens", 8), ("concurrency", 1)):
            if getattr(self, name) < least:
                raise ParamError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 <= self.heldout_share < 1:
            raise ParamError(f"heldout_share is {self.heldout_share}; it must be at least 0 and less than 1")
        if not 0 <= self.near_duplicates <= 1:
            raise ParamError(f"near_duplicates is {self.near_duplicates}; it must be 0 (off) or a similarity up to 1")
        if not 0 <= self.temperature <= 2:
            raise ParamError(f"temperature is {self.temperature}; it must be between 0 and 2")

    @property
    def sampling(self) -> dict[str, Any]:
        """What the server is told about how to write."""
        return {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens}

    def content(self) -> dict[str, Any]:
        """The options that decide the rows."""
        return {key: value for key, value in asdict(self).items() if key != "concurrency"}


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ParamError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
