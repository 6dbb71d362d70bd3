"""Questions: packaged sets, held-out rows and own files, as the ids that a server would get; nothing that cannot be asked."""

from __future__ import annotations

import json

import pytest
import talking
from dumps import as_dataset
from toys import prompts_of

from eagle3lib import questions, runs, targets
from eagle3lib.chat import Chat
from eagle3lib.errors import Eagle3Error, ParamError


@pytest.fixture(autouse=True)
def sets(monkeypatch):
    talking.packaged(monkeypatch)


@pytest.fixture(scope="module")
def chat(tiny):
    return Chat.of(tiny)


def test_questions_are_the_prompts_as_the_server_sees_them(chat):
    asked = questions.choose(["short"], 6, chat, room=500)
    assert sorted(q.id for q in asked.questions) == [p.id for p in talking.PROMPTS["short"]]
    for q in asked.questions:
        text = talking.PROMPTS["short"][int(q.id[1:])].turns[0]
        assert q.ids == chat.prompt_ids([{"role": "user", "content": text}]) and q.later == ()


def test_the_choice_depends_on_the_seed_alone(chat):
    ids = [[q.id for q in questions.choose(["short", "talks"], 2, chat, room=500, seed=s).questions] for s in (0, 0, 1, 2, 3)]
    assert ids[0] == ids[1] and len({tuple(i) for i in ids}) > 1
    assert [i[0] for i in ids[0]] == ["s", "s", "t", "t"]


def test_prompts_that_cannot_be_asked_are_replaced_and_counted(chat):
    asked = questions.choose(["odd"], 3, chat, room=500)
    assert [q.id for q in asked.questions] == ["fine"]
    assert asked.dropped == {"control token in text": 1, "prompt longer than the context allows": 1}
    assert "1 of odd" in repr(asked) and "left out" in repr(asked)


def test_a_set_with_nothing_to_ask_and_impossible_counts_are_errors(chat):
    with pytest.raises(Eagle3Error, match="set bad: none of its 1 prompts.*control token"):
        questions.choose(["bad"], 1, chat, room=500)
    with pytest.raises(ParamError, match="eval_prompts is 0"):
        questions.choose(["short"], 0, chat, room=500)


def test_the_real_sets_can_be_asked(chat, monkeypatch):
    monkeypatch.undo()
    asked = questions.choose(["mtbench", "humaneval", "gsm8k"], 2, chat, room=1800, turns=2)
    assert [q.set for q in asked.questions] == ["mtbench"] * 2 + ["humaneval"] * 2 + ["gsm8k"] * 2
    assert [len(q.later) for q in asked.questions] == [1, 1, 0, 0, 0, 0]


def test_room_is_what_the_context_leaves(tiny):
    model = targets.load_model(tiny)
    assert questions.room(model, 48, 5) == 2048 - 53


# Own files and held-out rows -----------------------------------------------------------------------------------------


def own_file(folder, *records):
    path = folder / "mine.jsonl"
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return str(path)


def test_a_file_of_conversations_is_a_set(chat, tmp_path):
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}, {"role": "assistant", "content": "an old reply"},
            {"role": "user", "content": "two"}]
    path = own_file(tmp_path, {"messages": talk}, {"prompt": "hello there"}, {"text": "already rendered"}, {"messages": []})
    asked = questions.choose([path, "short"], 5, chat, room=500)
    mine = {q.id: q for q in asked.questions if q.set == "mine"}
    assert set(mine) == {"0", "1"} and sum(asked.dropped.values()) == 2
    assert mine["0"].ids == chat.prompt_ids(talk[:2]) and mine["0"].later == ("two",)
    assert mine["1"].ids == chat.prompt_ids([{"role": "user", "content": "hello there"}])
    (second,) = questions.follow(mine["0"], list(b"abc"), chat, 500)
    assert second.messages[0] == talk[0] and second.messages[-1] == talk[3] and len(second.messages) == 4


def test_a_set_that_is_neither_known_nor_a_file_names_the_choices(chat, tmp_path):
    with pytest.raises(ParamError, match=r"'nothing' is no file and not known; choose from short, .*heldout, or give a file"):
        questions.choose(["nothing"], 1, chat, room=500)
    with pytest.raises(ParamError, match="'mine' is named twice"):
        questions.choose([own_file(tmp_path, {"prompt": "hello"})] * 2, 1, chat, room=500)


def prepared_run(run, chat, count=6):
    """A run with prepared rows of two replies each; every other one is held out."""
    rows = []
    for n, words in enumerate(prompts_of(count, seed=1, low=4, high=9)):
        ids = [*words, *chat.generation_prompt, *words, 2, *words, *chat.generation_prompt, 70, 71, 72]
        mask = [False] * len(ids)
        first = len(words) + len(chat.generation_prompt)
        mask[first : first + len(words) + 1] = [True] * (len(words) + 1)
        mask[-3:] = [True] * 3
        rows.append({"input_ids": ids, "loss_mask": mask, "n_tokens": len(ids), "n_supervised": sum(mask), "source": "s",
                     "sample_id": f"row{n}", "heldout": n % 2 == 0})
    as_dataset(rows).save_to_disk(str(run / "prepared"))
    runs.write_json(run / "prepared" / "prepared.json", {"rows_kept": count, "fingerprint": chat.fingerprint})
    return rows


def test_held_out_rows_are_asked_with_the_ids_of_training(chat, tmp_path):
    rows = prepared_run(tmp_path, chat)
    asked = questions.choose(["heldout"], 9, chat, room=500, run=tmp_path)
    assert {q.id for q in asked.questions} == {"row0", "row2", "row4"} and {q.set for q in asked.questions} == {"heldout"}
    for q in asked.questions:
        assert q.ids == rows[int(q.id[3:])]["input_ids"][:-3] and questions.follow(q, [70], chat, 500) == []
    with pytest.raises(ParamError, match="needs a run folder"):
        questions.choose(["heldout"], 1, chat, room=500)


@pytest.mark.parametrize("mask", [[True] * 5, [False] * 5, [True, False, False, False, False]])
def test_held_out_rows_without_a_prompt_are_counted_not_asked(chat, tmp_path, mask):
    rows = [{"input_ids": [70, 71, 72, 73, 74], "loss_mask": m, "n_tokens": 5, "n_supervised": sum(m), "source": "s", "sample_id": name,
             "heldout": True} for name, m in (("bare", mask), ("whole", [False, False, True, True, True]))]
    as_dataset(rows).save_to_disk(str(tmp_path / "prepared"))
    runs.write_json(tmp_path / "prepared" / "prepared.json", {"rows_kept": 2, "fingerprint": chat.fingerprint})
    asked = questions.choose(["heldout"], 9, chat, room=500, run=tmp_path)
    assert [(q.id, q.ids) for q in asked.questions] == [("whole", [70, 71])] and asked.dropped == {"no prompt before the reply": 1}


def test_the_tail_and_the_options_of_training(chat, tmp_path):
    prepared_run(tmp_path, chat)
    assert questions.trained_tail(tmp_path, len(chat.generation_prompt)) == chat.generation_prompt
    assert questions.trained_options(tmp_path) == {} == questions.trained_options(tmp_path / "nowhere")
    about = runs.read_json(tmp_path / "prepared" / "prepared.json")
    runs.write_json(tmp_path / "prepared" / "prepared.json",
                    {**about, "fingerprint": {**chat.fingerprint, "template_options": '{"enable_thinking": false}'}})
    assert questions.trained_options(tmp_path) == {"enable_thinking": False}
