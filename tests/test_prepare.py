"""The stage: accounting, identity, split, answers that survive a kill, and a folder that appears whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import templates
import xxhash

from eagle3lib import prepare, prepared
from eagle3lib.answers import Answer, AnswerBook
from eagle3lib.chat import Chat, Row
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.preview import View
from eagle3lib.records import NEAR_DUPLICATE, OVERLAP

END, BYTE0 = 2, 3  # ids of the byte tokenizer: <|im_end|>, and the first letter


@pytest.fixture
def chat() -> Chat:
    return Chat(templates.bytes_of("chatml"))


@dataclass
class FakeEngine:
    """Answers as a fixed function of the prompt: "re: " and the last user text, or a text of `long` letters."""

    chat: Chat
    long: int = 0
    finish: str = "stop"
    leave_out_end: bool = False
    asked: list[tuple[int, ...]] = field(default_factory=list)
    fingerprint: dict[str, str] = field(default_factory=dict)
    pause: float = 0.0

    def generate(self, input_ids: list[list[int]], *, max_new_tokens: int, on_result: Any, **_: Any) -> None:
        for index in random.Random(len(input_ids)).sample(range(len(input_ids)), len(input_ids)):  # replies come in any order
            time.sleep(self.pause)
            self.asked.append(tuple(input_ids[index]))
            on_result(index, self._reply(input_ids[index], max_new_tokens))

    def _reply(self, ids: list[int], max_new_tokens: int) -> SimpleNamespace:
        if self.finish == "refused":
            return SimpleNamespace(output_ids=[], finish_reason="refused", error="too long for me")
        prompt = self.chat.tokenizer.decode(ids)
        question = prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
        out = self.chat.tokenizer("x" * self.long if self.long else f"re: {question}", add_special_tokens=False)["input_ids"]
        done = [*out, END]
        if len(done) > max_new_tokens:
            return SimpleNamespace(output_ids=done[:max_new_tokens], finish_reason="length")
        return SimpleNamespace(output_ids=out if self.leave_out_end else done, finish_reason="stop")


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def talk(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


WITH_TOOL = talk(("user", "q"), ("assistant", ""), ("tool", "r"))
WITH_TOOL["messages"][1]["tool_calls"] = [{"name": "f"}]


def questions(n: int) -> list[dict[str, str]]:
    return [{"prompt": f"What is {i} plus {i * 7}, please?"} for i in range(n)]


def run(options: prepare.Options, chat: Chat, engine: Any, folder: Path) -> prepared.Prepared:
    loaded = prepare.load(options)
    return prepare.build(loaded, chat, folder, prepare.answer(loaded, chat, engine, folder))


def shown(chat: Chat, row: dict[str, Any]) -> str:
    """The row as text with the supervised stretches in brackets."""
    return prepare.samples_html(SimpleNamespace(rows=[row]), chat.tokenizer, 1).text.split("\n", 1)[1]


# answer="target" ---------------------------------------------------------------------------------------------------


def test_target_answers_become_rows_with_their_end_of_turn(tmp_path: Path, chat: Chat) -> None:
    engine = FakeEngine(chat)
    data = run(prepare.Options(prompts=write(tmp_path / "a.jsonl", questions(1))), chat, engine, tmp_path)
    assert shown(chat, data.rows[0]) == (
        "<|im_start|>user\nWhat is 0 plus 0, please?<|im_end|>\n<|im_start|>assistant\n⟦re: What is 0 plus 0, please?<|im_end|>⟧"
    )
    row = data.rows[0]
    assert tuple(row["input_ids"][: row["loss_mask"].index(True)]) == engine.asked[0]  # exactly what was sent
    assert (row["n_tokens"], row["n_supervised"]) == (len(row["input_ids"]), sum(row["loss_mask"]))
    assert data.about["answers"]["sampling"] == {"temperature": 0.0, "max_new_tokens": 96}


def test_stop_token_that_the_server_leaves_out_is_put_back(tmp_path: Path, chat: Chat) -> None:
    source = write(tmp_path / "a.jsonl", questions(1))
    whole = run(prepare.Options(prompts=source), chat, FakeEngine(chat), tmp_path / "1")
    without = run(prepare.Options(prompts=source), chat, FakeEngine(chat, leave_out_end=True), tmp_path / "2")
    assert whole.rows["input_ids"] == without.rows["input_ids"] and whole.rows["loss_mask"] == without.rows["loss_mask"]


def test_truncated_reply_is_never_taught_as_finished(tmp_path: Path, chat: Chat) -> None:
    source = write(tmp_path / "a.jsonl", [talk(("user", "one"), ("assistant", "-"), ("user", "two"))])
    options = prepare.Options(prompts=source, max_new_tokens=4)
    row = run(options, chat, FakeEngine(chat, long=9), tmp_path).rows[0]
    assert shown(chat, row) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n⟦xxxx⟧<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n⟦xxxx⟧"
    )
    taught = [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
    assert END not in taught
    with pytest.raises(Eagle3Error, match="1  dropped: reply cut at the token limit"):
        run(replace(options, truncated="drop"), chat, FakeEngine(chat, long=9), tmp_path)


def test_every_turn_is_answered_in_order(tmp_path: Path, chat: Chat) -> None:
    messages = [{"role": "system", "content": "S"}]
    for text in ("one", "two", "three"):
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "old reply, to be forgotten"}]
    source = write(tmp_path / "a.jsonl", [{"messages": messages[:5]}, {"messages": messages}])
    engine = FakeEngine(chat)
    data = run(prepare.Options(prompts=source), chat, engine, tmp_path)
    assert [shown(chat, r).count("⟦re: ") for r in sorted(data.rows, key=lambda r: r["n_tokens"])] == [2, 3]
    assert len(engine.asked) == len(set(engine.asked)) == 3  # the two share their first turns
    assert not any("forgotten" in shown(chat, r) for r in data.rows)
    last = run(prepare.Options(prompts=source, train_turns="last"), chat, engine, tmp_path)
    assert [shown(chat, r).count("⟦") for r in last.rows] == [1, 1] and len(engine.asked) == 3


def test_rewritten_history_gives_a_row_for_each_answer(tmp_path: Path) -> None:
    tokenizer = templates.bytes_of("chatml")
    tokenizer.chat_template = templates.CHATML.replace("message['content'] +", "message['content'].replace('re: ', '') +")
    chat = Chat(tokenizer)
    source = write(tmp_path / "a.jsonl", [talk(("user", "a"), ("assistant", "b"), ("user", "c"))])
    data = run(prepare.Options(prompts=source), chat, FakeEngine(chat), tmp_path)
    assert sorted(shown(chat, r).partition("⟦")[2] for r in data.rows) == ["re: a<|im_end|>⟧", "re: c<|im_end|>⟧"]
    assert (data.about["records_read"], data.about["rows_split"], data.about["rows_in"], data.about["rows_kept"]) == (1, 1, 2, 2)


@pytest.mark.parametrize(
    ("record", "engine", "reason"),
    [
        ({"prompt": "x" * 2000}, {}, "prompt leaves no room for a reply within max_tokens"),
        ({"prompt": "q"}, {"finish": "refused"}, "prompt refused by the server"),
        ({"prompt": "q <|im_end|>"}, {}, "control token in text"),
        ({"input_ids": [4, 5, 6]}, {}, "rendered text and token ids cannot be answered again"),
        (WITH_TOOL, {}, "tool results cannot be answered again"),
        ({"prompt": "\u2028"}, {}, "empty user turn"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_answered(tmp_path: Path, chat: Chat, record: dict, engine: dict, reason: str) -> None:
    source = write(tmp_path / "a.jsonl", [*questions(1), record])
    fake = FakeEngine(chat, **engine)
    if engine:
        with pytest.raises(Eagle3Error, match=reason):
            run(prepare.Options(prompts=source), chat, fake, tmp_path)
        assert len(fake.asked) == 2
        with pytest.raises(Eagle3Error, match="too long for me"):
            run(prepare.Options(prompts=source), chat, fake, tmp_path)
        assert len(fake.asked) == 2  # a refusal is an answer: it is not asked again
        return
    data = run(prepare.Options(prompts=source), chat, fake, tmp_path)
    assert data.about["dropped"] == {reason: 1} and len(fake.asked) == 1


def test_nothing_is_asked_twice_and_scopes_do_not_mix(tmp_path: Path, chat: Chat) -> None:
    options = prepare.Options(prompts=write(tmp_path / "a.jsonl", [*questions(20), *questions(5)]))
    engine = FakeEngine(chat)
    first = run(options, chat, engine, tmp_path)
    assert len(engine.asked) == 20 and first.about["dropped"] == {"duplicate": 5}
    run(options, chat, engine, tmp_path)
    assert len(engine.asked) == 20
    longer = prepare.Options(prompts=write(tmp_path / "a.jsonl", list(reversed(questions(23)))))
    run(longer, chat, engine, tmp_path)
    assert len(engine.asked) == 23
    run(replace(longer, max_new_tokens=50), chat, engine, tmp_path)
    assert len(engine.asked) == 46
    engine.fingerprint = {"dtype": "float32"}
    run(longer, chat, engine, tmp_path)
    assert len(engine.asked) == 69


def _answer_slowly(folder: Path, source: str) -> None:
    chat = Chat(templates.bytes_of("chatml"))
    prepare.answer(prepare.load(prepare.Options(prompts=source)), chat, FakeEngine(chat, pause=0.005), folder)


def test_kill_loses_nothing_and_doubles_nothing(tmp_path: Path, chat: Chat) -> None:
    source = write(tmp_path / "a.jsonl", questions(100))
    book = tmp_path / "answers.jsonl"
    process = multiprocessing.get_context("fork").Process(target=_answer_slowly, args=(tmp_path, source))
    process.start()
    deadline = time.monotonic() + 20
    while (not book.exists() or book.read_bytes().count(b"\n") < 20) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    done = book.read_bytes().count(b"\n")
    assert 20 <= done < 100
    with book.open("ab") as torn:
        torn.write(b'{"key":"0123')  # as if the kill had come in the middle of a line
    engine = FakeEngine(chat)
    data = run(prepare.Options(prompts=source), chat, engine, tmp_path)
    assert len(engine.asked) == 100 - done
    keys = [json.loads(line)["key"] for line in book.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 100 == data.about["rows_kept"]


def test_build_without_all_answers_is_refused(tmp_path: Path, chat: Chat) -> None:
    loaded = prepare.load(prepare.Options(prompts=write(tmp_path / "a.jsonl", questions(3))))
    with pytest.raises(Eagle3Error, match="call prepare.answer first"):
        prepare.build(loaded, chat, tmp_path)
    with pytest.raises(Eagle3Error, match="no answer yet"):
        prepare.build(loaded, chat, tmp_path, AnswerBook(tmp_path / "b.jsonl", {}))
    assert not list(tmp_path.glob("*prepared*"))


def test_answer_book_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    book = AnswerBook(path, {"a": 1})
    with pytest.raises(RuntimeError):
        book.put([1], Answer([5], "stop"))
    with book, pytest.raises(Eagle3Error, match="another process"), AnswerBook(path, {"a": 1}):
        pass
    with book:
        book.put([1, 2], Answer([5, 6], "stop"))
        book.put([1, 2], Answer([7], "length"))  # the first stands
    assert AnswerBook(path, {"a": 1}).get([1, 2]) == book.get([1, 2]) == Answer([5, 6], "stop")
    assert AnswerBook(path, {"a": 2}).get([1, 2]) is None and book.get([1]) is None
    path.write_bytes(path.read_bytes() + b"garbage\n")
    with pytest.raises(Eagle3Error, match=r"answers\.jsonl:2: not an answer"):
        AnswerBook(path, {"a": 1})


def test_full_disk_is_one_readable_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = AnswerBook(tmp_path / "answers.jsonl", {})
    with book:
        book.put([1], Answer([5] * 50, "stop"))
        monkeypatch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(Eagle3Error, match="No space left on device.*run again"):
            book.put([2], Answer([5], "stop"))
    monkeypatch.undo()
    assert AnswerBook(tmp_path / "answers.jsonl", {}).get([1]) == Answer([5] * 50, "stop")


# identity, split, order --------------------------------------------------------------------------------------------


def answered(folder: Path, chat: Chat, records: list[Any], **options: Any) -> prepared.Prepared:
    folder.mkdir(exist_ok=True)
    chosen = prepare.Options(prompts=write(folder / "data.jsonl", records), answer="data", **{"max_prompts": 0, **options})
    return prepare.build(prepare.load(chosen), chat, folder)


def pairs(n: int) -> list[dict[str, str]]:
    return [{"prompt": f"Question number {i}?", "response": f"Answer number {i}."} for i in range(n)]


def test_sample_id_is_the_hash_of_ids_and_mask(tmp_path: Path, chat: Chat) -> None:
    row = answered(tmp_path, chat, pairs(1)).rows[0]
    ids = b"".join(i.to_bytes(4, "little") for i in row["input_ids"])
    assert row["sample_id"] == xxhash.xxh3_128_hexdigest(ids + bytes(row["loss_mask"]))
    assert prepare.id_of(Row([1, 2], [False, True])) != prepare.id_of(Row([1, 2], [True, True]))


def test_order_of_the_input_does_not_matter(tmp_path: Path, chat: Chat) -> None:
    for options in ({}, {"max_prompts": 30, "seed": 3}):
        one = answered(tmp_path / "1", chat, pairs(80), **options)
        two = answered(tmp_path / "2", chat, list(reversed(pairs(80))), **options)
        assert one.rows["sample_id"] == two.rows["sample_id"]
    other = answered(tmp_path / "1", chat, pairs(80), max_prompts=30, seed=4)
    assert set(other.rows["sample_id"]) != set(one.rows["sample_id"])


def test_seed_shuffles_and_changes_no_id(tmp_path: Path, chat: Chat) -> None:
    one, two = (answered(tmp_path, chat, pairs(50), seed=seed).rows["sample_id"] for seed in (0, 1))
    assert list(one) != list(two) and sorted(one) == sorted(two)


def test_heldout_split_does_not_move_when_data_are_added(tmp_path: Path, chat: Chat) -> None:
    few = answered(tmp_path / "1", chat, pairs(300), heldout_share=0.2)
    more = answered(tmp_path / "2", chat, pairs(900), heldout_share=0.2, seed=5)
    side = dict(zip(more.rows["sample_id"], more.rows["heldout"], strict=True))
    assert all(side[i] == h for i, h in zip(few.rows["sample_id"], few.rows["heldout"], strict=True))
    assert 0.15 < sum(more.rows["heldout"]) / 900 < 0.25 and sum(more.rows["heldout"]) == more.about["rows_heldout"]
    wider = answered(tmp_path / "2", chat, pairs(900), heldout_share=0.5)
    assert {i for i, h in zip(more.rows["sample_id"], more.rows["heldout"], strict=True) if h} < {
        i for i, h in zip(wider.rows["sample_id"], wider.rows["heldout"], strict=True) if h}  # fmt: skip


def test_all_rows_of_a_conversation_are_on_one_side(tmp_path: Path) -> None:
    chat = Chat(templates.bytes_of("thinking"))
    records = []
    for i in range(40):
        record = talk(*[turn for t in range(3) for turn in (("user", f"{i} {t}?"), ("assistant", "yes"))])
        for reply in record["messages"][1::2]:
            reply["reasoning_content"] = "hm"
        records.append(record)
    data = answered(tmp_path, chat, records, heldout_share=0.5)
    assert data.about["rows_split"] == 80 and data.about["rows_kept"] == 120
    sides: dict[str, set[bool]] = {}
    for row in data.rows:
        sides.setdefault(chat.tokenizer.decode(row["input_ids"]).split("\n")[1].split()[0], set()).add(row["heldout"])
    assert len(sides) == 40 and all(len(s) == 1 for s in sides.values()) and {True, False} == set.union(*sides.values())


def test_other_answers_to_a_prompt_are_on_its_side(tmp_path: Path, chat: Chat) -> None:
    """Else what is held out would be taught with a slightly different reply."""
    one = answered(tmp_path / "1", chat, pairs(60), heldout_share=0.5)
    two = answered(tmp_path / "2", chat, [{**p, "response": "Something else."} for p in pairs(60)], heldout_share=0.5)

    def heldout(data: prepared.Prepared) -> set[str]:
        return {shown(chat, row).split("⟦")[0] for row in data.rows if row["heldout"]}

    assert 10 < len(heldout(one)) < 50 and heldout(one) == heldout(two)


# cleaning and accounting -------------------------------------------------------------------------------------------


def test_decontamination(tmp_path: Path, chat: Chat) -> None:
    copied = {"prompt": "Please: compose an ENGAGING travel blog post about a recent trip to Hawaii!", "response": "No."}
    in_reply = {"prompt": "Say it.", "response": "compose an engaging travel blog post about a recent trip"}
    data = answered(tmp_path, chat, [*pairs(2), copied, in_reply])
    assert data.about["dropped"] == {OVERLAP: 2}
    assert "compose an engaging travel blog post about a" in data.about["examples"][OVERLAP]
    assert answered(tmp_path, chat, [*pairs(2), copied], decontaminate=False).about["dropped"] == {}


def test_duplicates_count_once_whatever_their_shape(tmp_path: Path, chat: Chat) -> None:
    one = {"prompt": "a", "response": "b c"}
    same = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b c"}]}
    rendered = {"text": chat.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}])}
    data = answered(tmp_path, chat, [one, same, rendered, one])
    assert (data.about["rows_in"], data.about["rows_kept"], data.about["dropped"]) == (4, 1, {"duplicate": 3})


def test_duplicates_count_once_with_a_sample_and_without(tmp_path: Path, chat: Chat) -> None:
    for most in (0, 100):
        about = answered(tmp_path, chat, [*pairs(5), *pairs(3)], max_prompts=most).about
        assert (about["rows_in"], about["rows_kept"], about["dropped"]) == (8, 5, {"duplicate": 3})


def test_near_duplicates_are_dropped_when_asked(tmp_path: Path, chat: Chat) -> None:
    text = " ".join(f"word{i}" for i in range(60))
    records = [{"prompt": "Say", "response": text}, {"prompt": "Say", "response": f"{text}!"}, *pairs(1)]
    assert answered(tmp_path, chat, records).about["dropped"] == {}
    assert answered(tmp_path, chat, records, near_duplicates=0.8).about["dropped"] == {NEAR_DUPLICATE: 1}


def test_accounting_balances_by_source_with_sampling_caps_and_drops(tmp_path: Path, chat: Chat) -> None:
    a, b = write(tmp_path / "a.jsonl", [*pairs(40), 5, {"prompt": ""}]), write(tmp_path / "b.jsonl", [{"no": 1}, *pairs(45)])
    options = prepare.Options(prompts=[a, f"{b}@10"], answer="data", max_prompts=12)
    about = prepare.build(prepare.load(options), chat, tmp_path).about
    assert (about["records_read"], about["rows_kept"]) == (52, 12)
    assert about["sources"]["b.jsonl"]["dropped"] == {"duplicate": 9, "no conversation in the record": 1}
    for part in (about, *about["sources"].values()):
        assert part["rows_in"] == part["rows_kept"] + sum(part["dropped"].values()) == part["records_read"] - part["not_sampled"]
    assert sum(p["rows_in"] for p in about["sources"].values()) == about["rows_in"]


def test_over_long_rows_are_cut_and_counted(tmp_path: Path, chat: Chat) -> None:
    records = [{"prompt": "q", "response": "r" * 500}, {"prompt": "q" * 500, "response": "r"}, *pairs(1)]
    data = answered(tmp_path, chat, records, max_tokens=100)
    assert (data.about["rows_cut"], data.about["rows_kept"]) == (1, 2) and max(data.rows["n_tokens"]) == 100
    assert data.about["dropped"] == {"no supervised tokens within max_tokens": 1}


def test_nothing_left_shows_the_table_of_reasons(tmp_path: Path, chat: Chat) -> None:
    for most in (0, 5):
        with pytest.raises(Eagle3Error) as error:
            answered(tmp_path, chat, [3, {"prompt": ""}, {"prompt": " "}], max_prompts=most)
        first, *table = str(error.value).splitlines()
        assert "no conversations left" in first
        assert any("2  dropped: empty user turn  (first: " in line for line in table)
    assert not list(tmp_path.glob("*prepared*"))


@pytest.mark.parametrize(
    "wrong",
    [{"answer": "both"}, {"truncated": "x"}, {"train_turns": "some"}, {"max_prompts": -1}, {"max_new_tokens": 1}, {"max_tokens": 0},
     {"heldout_share": 1.0}, {"heldout_share": -0.1}, {"temperature": 3.0}, {"near_duplicates": 1.5}, {"concurrency": 0}],
)  # fmt: skip
def test_options_out_of_range(wrong: dict) -> None:
    with pytest.raises(ParamError, match=next(iter(wrong))):
        prepare.Options(**wrong)


def test_rows_must_fit_the_context_of_the_target(tmp_path: Path) -> None:
    chat = Chat(templates.bytes_of("chatml"), context=1024)
    options = prepare.Options(prompts=write(tmp_path / "a.jsonl", questions(1)), max_tokens=1024)
    engine = FakeEngine(chat)
    with pytest.raises(ParamError, match="max_tokens is 1024.*context of 1024"):
        run(options, chat, engine, tmp_path)
    assert not engine.asked
    run(replace(options, max_tokens=1023), chat, engine, tmp_path)


def test_wrong_source_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="no such file"):
        prepare.load(prepare.Options(prompts=str(tmp_path / "missing.jsonl"), max_prompts=0))
    with pytest.raises(ParamError, match="empty list"):
        prepare.load(prepare.Options(prompts=[]))


# the folder --------------------------------------------------------------------------------------------------------


def test_unchanged_preparation_is_reused_and_any_change_makes_a_new_one(tmp_path: Path, chat: Chat) -> None:
    def age(**options: Any) -> int:
        answered(tmp_path, chat, options.pop("records", pairs(5)), **options)
        return (tmp_path / "prepared" / "prepared.json").stat().st_mtime_ns

    first = age()
    assert age() == first == age(concurrency=3)
    second = age(max_tokens=500)
    assert second != first and age(records=pairs(6), max_tokens=500) != second
    tokenizer = templates.bytes_of("chatml")
    third = age()
    other = Chat(tokenizer, fingerprint={"chat_template": "other"})
    prepare.build(prepare.load(prepare.Options(prompts=str(tmp_path / "data.jsonl"), answer="data", max_prompts=0)), other, tmp_path)
    assert (tmp_path / "prepared" / "prepared.json").stat().st_mtime_ns != third


def test_damaged_folders_are_refused_and_remade(tmp_path: Path, chat: Chat) -> None:
    with pytest.raises(Eagle3Error, match="no prepared rows there"):
        prepare.load_prepared(tmp_path)
    answered(tmp_path, chat, pairs(5))
    folder = tmp_path / "prepared"
    (arrow,) = folder.glob("*.arrow")
    for damage in (lambda: arrow.write_bytes(arrow.read_bytes()[:100]), arrow.unlink, lambda: (folder / "prepared.json").unlink(),
                   lambda: (folder / "prepared.json").write_text("{"), lambda: (folder / "state.json").unlink()):  # fmt: skip
        damage()
        with pytest.raises(Eagle3Error):
            prepare.load_prepared(tmp_path)
        answered(tmp_path, chat, pairs(5))
        assert len(prepare.load_prepared(tmp_path)) == 5


def test_failure_on_the_way_leaves_the_old_folder(tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(tmp_path, chat, pairs(5))
    (tmp_path / ".prepared.999").mkdir()  # what a kill leaves behind
    monkeypatch.setattr(prepared, "write_json", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Eagle3Error, match="No space left on device"):
        answered(tmp_path, chat, pairs(6))
    assert len(prepare.load_prepared(tmp_path)) == 5
    assert not list(tmp_path.glob(".prepared*"))


def test_types_of_the_columns(tmp_path: Path, chat: Chat) -> None:
    rows = answered(tmp_path, chat, pairs(2)).rows
    assert rows.features == prepared.FEATURES
    assert rows.data.schema.field("input_ids").type.value_type == "int32"
    assert set(rows.column_names) == {"input_ids", "loss_mask", "n_tokens", "n_supervised", "source", "sample_id", "heldout"}


# what the notebook shows -------------------------------------------------------------------------------------------


def test_views_escape_and_mark(tmp_path: Path, chat: Chat) -> None:
    data = answered(tmp_path, chat, [{"prompt": "<script>alert(1)</script>", "response": "<b>&amp;</b> 😀 done"}])
    view = prepare.samples_html(data, chat.tokenizer, 3)
    assert isinstance(view, View) and "<script>" not in view._repr_html_() and "<b>&amp;</b>" not in view._repr_html_()
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt; 😀 done&lt;|im_end|&gt;</mark>" in view._repr_html_()
    assert "⟦<b>&amp;</b> 😀 done<|im_end|>⟧" in repr(view)
    table = prepare.accounting_table(answered(tmp_path, chat, [*pairs(2), {"prompt": "<i>"}, 5]))
    assert "1  dropped: no reply in the record" in repr(table) and "2  rows kept" in repr(table)
    assert "<td style='text-align:left'>dropped: record is not an object</td>" in table._repr_html_()


def test_metrics_and_forecast(tmp_path: Path, chat: Chat) -> None:
    data = answered(tmp_path, chat, pairs(4))
    metrics = data.metrics()
    assert metrics["rows_in"] == metrics["rows_kept"] == 4
    assert metrics["tokens"] == sum(data.rows["n_tokens"]) and metrics["supervised_tokens"] == sum(map(sum, data.rows["loss_mask"]))
    forecast = prepare.forecast(data, hidden_size=64, aux_layers=3, prefill_tokens_per_s=880)
    assert forecast.dump_bytes == metrics["tokens"] * 4 * 64 * 2
    assert forecast.hours == pytest.approx(metrics["tokens"] / 880 / 3600)
    assert f"{metrics['tokens']:,} tokens" in repr(forecast)
