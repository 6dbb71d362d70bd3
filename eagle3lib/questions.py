"""Questions: what is asked of the target when a draft is evaluated, as the token ids that a server would get.

A set is one of `evalsets` (packaged), "heldout" (rows of this run that were not trained on), or a file, folder or glob of
your own conversations in any shape that 01_prepare reads; of those the system and user turns are asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from eagle3lib import conversations, evalsets, prepared, sources
from eagle3lib.chat import Chat
from eagle3lib.conversations import Drop, Message
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.replay import questions as asked_turns
from eagle3lib.runs import read_json

HELDOUT = "heldout"
T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """A prompt as token ids; `later` are the user's next turns, to be asked after the reply."""

    set: str
    id: str
    ids: list[int]
    messages: list[Message]
    later: tuple[str, ...] = ()
    tools: list[dict[str, Any]] | None = None


@dataclass
class Asked:
    """The questions in a fixed order, and what could not be asked: reason -> how many."""

    questions: list[Question] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        sets = {q.set: sum(x.set == q.set for x in self.questions) for q in self.questions}
        left_out = f"; left out: {self.dropped}" if self.dropped else ""
        return ", ".join(f"{n} of {name}" for name, n in sets.items()) + left_out


@dataclass(frozen=True)
class Candidate:
    """What a set holds before it is asked: user turns behind a system turn or none, or (held-out rows) ready token ids."""

    id: str
    turns: list[str] = field(default_factory=list)
    system: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    ids: list[int] = field(default_factory=list)
    drop: Drop | None = None


def choose(sets: Sequence[str], per_set: int, chat: Chat, *, room: int, turns: int = 2, seed: int = 0, run: Path | None = None) -> Asked:
    """`per_set` prompts of each set, drawn by the seed; the first `turns` turns of each will be asked.

    `room`: the longest prompt that can be asked [tokens]. `run`: the run folder, for "heldout". Prompts that are longer, or
    hold control tokens, are replaced and counted. ParamError on an unknown set or a count below one; Eagle3Error when
    nothing is left of a set.
    """
    if per_set < 1 or turns < 1:
        raise ParamError(f"eval_prompts is {per_set} and the turns are {turns}; both must be at least 1")
    asked = Asked()
    for name in sets:
        label, listed = candidates(name, run)
        found = _draw(label, listed, per_set, chat, room, turns, seed, asked.dropped)
        if not found:
            raise Eagle3Error(f"evaluation set {name}: none of its {len(listed)} prompts can be asked: {asked.dropped}. Choose another")
        if label in {q.set for q in asked.questions}:
            raise ParamError(f"evaluation set {label!r} is named twice; give each file another name")
        asked.questions += found
    return asked


def _draw(label: str, listed: list[Candidate], count: int, chat: Chat, room: int, turns: int, seed: int, dropped: dict[str, int]) -> list[Question]:
    found: list[Question] = []
    for i in np.random.default_rng(seed).permutation(len(listed)):
        if len(found) == count:
            break
        try:
            found.append(_asked(label, listed[i], chat, room, turns))
        except Drop as drop:
            dropped[drop.reason] = dropped.get(drop.reason, 0) + 1
    return found


def _asked(label: str, candidate: Candidate, chat: Chat, room: int, turns: int) -> Question:
    if candidate.drop:
        raise candidate.drop
    if not candidate.ids:
        return question(label, candidate.id, candidate.system, candidate.turns[:turns], chat, room, candidate.tools)
    _require_room(candidate.ids, room)
    return Question(label, candidate.id, candidate.ids, [])


def question(label: str, id: str, history: list[Message], turns: Sequence[str], chat: Chat, room: int,
             tools: list[dict[str, Any]] | None = None) -> Question:
    """The first of `turns` behind `history`, as a prompt; the others wait in `later`. Drop when it cannot be asked."""
    messages = [*history, {"role": "user", "content": turns[0]}]
    ids = chat.prompt_ids(messages, tools)
    _require_room(ids, room)
    return Question(label, id, ids, messages, tuple(turns[1:]), tools)


def _require_room(ids: Sequence[int], room: int) -> None:
    if len(ids) > room:
        raise Drop("prompt longer than the context allows", f"{len(ids)} tokens")


def follow(asked: Question, reply: Sequence[int], chat: Chat, room: int) -> list[Question]:
    """The question's next turn, behind the reply as a client would send it back; none when that cannot be asked."""
    if not asked.later:
        return []
    history = [*asked.messages, {"role": "assistant", "content": chat.decode_reply(reply)}]
    try:
        return [question(asked.set, f"{asked.id}+", history, asked.later, chat, room, asked.tools)]
    except Drop:
        return []  # the reply holds a control token in text, or fills the context: the conversation ends here


def talks(pairs: Iterable[tuple[Question, T]]) -> list[list[T]]:
    """The turns of each conversation together: they are not independent, so intervals are over conversations."""
    found: dict[tuple[str, str], list[T]] = {}
    for question, value in pairs:
        found.setdefault((question.set, question.id.rstrip("+")), []).append(value)
    return list(found.values())


def room(model: Any, max_new_tokens: int, steps: int) -> int:
    """The longest prompt [tokens] that leaves room for a reply and one more chain in the target's context."""
    return model.config.get_text_config().max_position_embeddings - max_new_tokens - steps


# Sets ----------------------------------------------------------------------------------------------------------------


def candidates(name: str, run: Path | None) -> tuple[str, list[Candidate]]:
    """(the set's name in tables, what it holds). ParamError for a name that is neither a set nor a file."""
    if name in evalsets.NAMES:
        return name, [Candidate(prompt.id, prompt.turns) for prompt in evalsets.load(name)]
    if name == HELDOUT:
        return name, _heldout(run)
    if not sources.find_files(name):
        raise ParamError(f"evaluation set {name!r} is no file and not known; choose from {', '.join(evalsets.NAMES)}, {HELDOUT}, "
                         "or give a file of conversations")
    return Path(name).stem, [_own(raw, number) for number, raw in enumerate(sources.read(name))]


def _own(raw: sources.Raw, number: int) -> Candidate:
    try:
        if raw.broken:
            raise Drop(raw.broken, raw.where)
        asked = asked_turns(conversations.parse(raw.value))
    except Drop as drop:
        return Candidate(str(number), drop=drop)
    system = [m for m in asked.messages if m["role"] == "system"]
    return Candidate(str(number), [m["content"] for m in asked.messages if m["role"] == "user"], system, asked.tools)


def _heldout(run: Path | None) -> list[Candidate]:
    """The held-out rows up to their last reply: exactly the ids that training rows have."""
    if run is None:
        raise ParamError(f"evaluation set {HELDOUT!r} needs a run folder with prepared rows")
    rows = prepared.load_prepared(run)
    rows = rows.select(np.flatnonzero(np.asarray(rows["heldout"])))
    return [_row(row) for row in rows]


def _row(row: dict[str, Any]) -> Candidate:
    if ids := row["input_ids"][: _last_reply(row["loss_mask"])]:
        return Candidate(row["sample_id"], ids=ids)
    return Candidate(row["sample_id"], drop=Drop("no prompt before the reply", row["sample_id"]))


def _last_reply(mask: Sequence[bool]) -> int:
    """Where the last supervised stretch begins; 0 without one."""
    return max((t for t in range(len(mask)) if mask[t] and (t == 0 or not mask[t - 1])), default=0)


# As in training ------------------------------------------------------------------------------------------------------


def trained_options(run: Path) -> dict[str, Any]:
    """The template options that 01_prepare used; {} when nothing was prepared here."""
    about = Path(run) / prepared.FOLDER / prepared.ABOUT
    fingerprint = read_json(about).get("fingerprint", {}) if about.is_file() else {}
    return json.loads(fingerprint.get("template_options") or "{}")


def trained_tail(run: Path, count: int) -> list[int]:
    """The last `count` tokens before a reply in the prepared rows; [] when there are none."""
    for row in prepared.load_prepared(run):
        if any(row["loss_mask"]):
            begin = _last_reply(row["loss_mask"])
            return row["input_ids"][max(0, begin - count) : begin]
    return []
