"""Questions: what is asked of the target when a draft is evaluated, as the token ids that a server would get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle3lib import evalsets
from eagle3lib.chat import Chat
from eagle3lib.conversations import Drop
from eagle3lib.errors import Eagle3Error, ParamError


@dataclass(frozen=True)
class Question:
    """A prompt as token ids; `later` are the user's next turns, to be asked after the reply."""

    set: str
    id: str
    ids: list[int]
    messages: list[dict[str, str]]
    later: tuple[str, ...] = ()


@dataclass
class Asked:
    """The questions in a fixed order, and what could not be asked: reason -> how many."""

    questions: list[Question] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        sets = {q.set: sum(x.set == q.set for x in self.questions) for q in self.questions}
        left_out = f"; left out: {self.dropped}" if self.dropped else ""
        return ", ".join(f"{n} of {name}" for name, n in sets.items()) + left_out


def choose(sets: Sequence[str], per_set: int, chat: Chat, *, room: int, turns: int = 1, seed: int = 0) -> Asked:
    """`per_set` prompts of each set, drawn by the seed; the first `turns` turns of each will be asked.

    `room`: the longest prompt that can be asked [tokens]. Prompts that are longer, or hold control tokens, are replaced
    and counted. ParamError on an unknown set or a count below one; Eagle3Error when nothing is left of a set.
    """
    if per_set < 1 or turns < 1:
        raise ParamError(f"eval_prompts is {per_set} and the turns are {turns}; both must be at least 1")
    asked = Asked()
    for name in sets:
        prompts, found = evalsets.load(name), 0
        for i in np.random.default_rng(seed).permutation(len(prompts)):
            if found == per_set:
                break
            try:
                asked.questions.append(question(name, prompts[i].id, [], prompts[i].turns[:turns], chat, room))
                found += 1
            except Drop as drop:
                asked.dropped[drop.reason] = asked.dropped.get(drop.reason, 0) + 1
        if not found:
            raise Eagle3Error(f"evaluation set {name}: none of its {len(prompts)} prompts can be asked: {asked.dropped}. Choose another")
    return asked


def question(name: str, id: str, history: list[dict[str, str]], turns: Sequence[str], chat: Chat, room: int) -> Question:
    """The first of `turns` behind `history`, as a prompt; the others wait in `later`. Drop when it cannot be asked."""
    messages = [*history, {"role": "user", "content": turns[0]}]
    ids = chat.prompt_ids(messages)
    if len(ids) > room:
        raise Drop("prompt longer than the context allows", f"{len(ids)} tokens")
    return Question(name, id, ids, messages, tuple(turns[1:]))


def follow(asked: Question, reply: Sequence[int], chat: Chat, room: int) -> list[Question]:
    """The question's next turn, behind the reply as a client would send it back; none when that cannot be asked."""
    if not asked.later:
        return []
    history = [*asked.messages, {"role": "assistant", "content": chat.decode_reply(reply)}]
    try:
        return [question(asked.set, f"{asked.id}+", history, asked.later, chat, room)]
    except Drop:
        return []  # the reply holds a control token in text, or fills the context: the conversation ends here


def room(model: Any, max_new_tokens: int, steps: int) -> int:
    """The longest prompt [tokens] that leaves room for a reply and one more chain in the target's context."""
    return model.config.get_text_config().max_position_embeddings - max_new_tokens - steps
