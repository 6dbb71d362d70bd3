"""The target answers: every turn once, in order, and nothing is lost when the work is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import templates
from preparing import END, FakeEngine, questions, run, shown, talk, write

from eagle3lib import prepare
from eagle3lib.answers import Answer, AnswerBook
from eagle3lib.chat import Chat
from eagle3lib.errors import Eagle3Error, ParamError

WITH_TOOL = talk(("user", "q"), ("assistant", ""), ("tool", "r"))
WITH_TOOL["messages"][1]["tool_calls"] = [{"name": "f"}]

@pytest.fixture
def chat() -> Chat:
    return Chat(templates.bytes_of("chatml"))


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


def test_several_engines_share_the_prompts(tmp_path: Path, chat: Chat) -> None:
    source = write(tmp_path / "a.jsonl", questions(41))
    engines = [FakeEngine(chat) for _ in range(3)]
    data = run(prepare.Options(prompts=source), chat, engines, tmp_path / "1")
    assert sorted(len(e.asked) for e in engines) == [13, 14, 14] and len({p for e in engines for p in e.asked}) == 41
    alone = run(prepare.Options(prompts=source), chat, FakeEngine(chat), tmp_path / "2")
    assert data.rows.to_list() == alone.rows.to_list()
    broken = [FakeEngine(chat), FakeEngine(chat, fails_after=5)]
    with pytest.raises(Eagle3Error, match="gone"):
        run(prepare.Options(prompts=source), chat, broken, tmp_path / "3")
    again = FakeEngine(chat)
    assert run(prepare.Options(prompts=source), chat, again, tmp_path / "3").about["rows_kept"] == 41
    assert len(again.asked) == 41 - 21 - 5  # the other finished its share, and both shares are kept
    with pytest.raises(Eagle3Error, match="engines .* differ"):
        run(prepare.Options(prompts=source), chat, [FakeEngine(chat), FakeEngine(chat, fingerprint={"dtype": "x"})], tmp_path / "4")


def test_sampling_is_told_to_the_server_and_kept_with_the_rows(tmp_path: Path, chat: Chat) -> None:
    source, engine = write(tmp_path / "a.jsonl", questions(2)), FakeEngine(chat)
    about = run(prepare.Options(prompts=source, temperature=0.7, sampling_seed=9, concurrency=5), chat, engine, tmp_path).about
    assert {k: engine.told[k] for k in ("temperature", "sampling_seed", "concurrency")} == {"temperature": 0.7, "sampling_seed": 9, "concurrency": 5}
    assert set(engine.told["stop_token_ids"]) == chat.stop_ids
    assert about["answers"]["sampling"] == {"temperature": 0.7, "sampling_seed": 9, "max_new_tokens": 96}
    run(prepare.Options(prompts=source, temperature=0.7, sampling_seed=10), chat, engine, tmp_path)
    assert len(engine.asked) == 4  # another seed is another answer
    greedy = FakeEngine(chat)
    run(prepare.Options(prompts=source, sampling_seed=10), chat, greedy, tmp_path)
    assert "sampling_seed" not in greedy.told and greedy.told["temperature"] == 0


@pytest.mark.parametrize("most", [0, 50])
def test_progress_knows_how_many_turns_there_are(tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Time left is told without a sample too, and counts turns that need no request: answered before, or shared."""
    bars = []

    class Bar(prepare.tqdm):  # type: ignore
        def __init__(self, *args: object, **options: object):
            super().__init__(*args, **options)
            bars.append(self)

    monkeypatch.setattr(prepare, "tqdm", Bar)
    talks = [talk(("user", f"one {i % 3}"), ("assistant", "-"), ("user", f"two {i}")) for i in range(7)]
    monkeypatch.setattr(prepare, "_CHUNK", 4)
    run(prepare.Options(prompts=write(tmp_path / "a.jsonl", [*talks, {"prompt": ""}]), max_prompts=most), chat, FakeEngine(chat), tmp_path)
    (bar,) = [b for b in bars if b.desc == "answer"]
    assert bar.total == bar.n == 14 and "tok/s out" in bar.postfix


def test_thinking_that_cannot_be_told_apart_is_refused_before_anything_is_asked(tmp_path: Path, chat: Chat) -> None:
    engine = FakeEngine(chat)
    with pytest.raises(ParamError, match="train_thinking=False"):
        run(prepare.Options(prompts=write(tmp_path / "a.jsonl", questions(2)), train_thinking=False), chat, engine, tmp_path)
    assert not engine.asked


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
