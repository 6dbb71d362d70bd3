"""Cleaning, mixing and accounting: every record is a row, or is counted under its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import templates
from preparing import FakeEngine, answered, pairs, questions, run, talk, write

from eagle3lib import prepare
from eagle3lib.chat import Chat
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.records import BROKEN, NEAR_DUPLICATE, OVERLAP


@pytest.fixture
def chat() -> Chat:
    return Chat(templates.bytes_of("chatml"))


def test_decontamination(tmp_path: Path, chat: Chat) -> None:
    copied = {"prompt": "Please: compose an ENGAGING travel blog post about a recent trip to Hawaii!", "response": "No."}
    in_reply = {"prompt": "Say it.", "response": "compose an engaging travel blog post about a recent trip"}
    data = answered(tmp_path, chat, [*pairs(2), copied, in_reply])
    assert data.about["dropped"] == {OVERLAP: 2}
    assert "compose an engaging travel blog post about a" in data.about["examples"][OVERLAP]
    assert answered(tmp_path, chat, [*pairs(2), copied], decontaminate=False).about["dropped"] == {}


def test_decontamination_reads_token_ids(tmp_path: Path, chat: Chat) -> None:
    asked = "Please: compose an ENGAGING travel blog post about a recent trip to Hawaii!"
    records = [{"input_ids": chat.tokenizer(chat.render(turns), add_special_tokens=False)["input_ids"]}
               for turns in (talk(("user", text), ("assistant", "No."))["messages"] for text in ("What is this about?", asked))]
    assert answered(tmp_path, chat, records).about["dropped"] == {OVERLAP: 1}
    assert answered(tmp_path, chat, records, decontaminate=False).about["dropped"] == {}


def test_files_of_one_name_are_told_apart(tmp_path: Path, chat: Chat) -> None:
    files = []
    for n, name in enumerate(("a/x/train.jsonl", "b/x/train.jsonl", "b/y/train.jsonl", "b/y/other.jsonl")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        files.append(write(tmp_path / name, [{"prompt": f"q{n}{i}", "response": "r s"} for i in range(n + 1)]))
    loaded = prepare.load(prepare.Options(prompts=files, answer="data", max_prompts=0, heldout_share=0))
    counts = {name: count["rows_kept"] for name, count in prepare.build(loaded, chat, tmp_path).about["sources"].items()}
    assert counts == {"a/x/train.jsonl": 1, "b/x/train.jsonl": 2, "y/train.jsonl": 3, "other.jsonl": 4}


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


# mixing and broken lines -------------------------------------------------------------------------------------------


def test_shares_hold_whatever_the_sizes(tmp_path: Path, chat: Chat) -> None:
    """The proportions are kept when a source has too little: then the mix gets smaller."""
    a, b = write(tmp_path / "a.jsonl", pairs(80)), write(tmp_path / "b.jsonl", [{"prompt": f"b{i}", "response": "r s"} for i in range(10)])

    def mixed(folder: str, **options: object) -> tuple[int, int, list[str]]:
        about = (data := prepare.build(prepare.load(prepare.Options(answer="data", **options)), chat, tmp_path / folder)).about  # type: ignore
        for part in about["sources"].values():
            assert part["rows_in"] == part["rows_kept"] + sum(part["dropped"].values()) == part["records_read"] - part["not_sampled"]
        return about["sources"]["a.jsonl"]["rows_kept"], about["sources"]["b.jsonl"]["rows_kept"], sorted(data.rows["sample_id"])

    assert mixed("1", prompts=[f"{a}@75%", f"{b}@25%"], max_prompts=20)[:2] == (15, 5)
    assert mixed("2", prompts=[f"{a}@75%", f"{b}@25%"], max_prompts=60)[:2] == (30, 10)
    assert mixed("3", prompts=[f"{a}@99.5%", f"{b}@0.5%"], max_prompts=60)[:2] == (60, 0)
    one, two = (mixed(n, prompts=p, max_prompts=20)[2] for n, p in (("4", [f"{a}@50%", f"{b}@50%"]), ("5", [f"{b}@50%", f"{a}@50%"])))
    write(tmp_path / "a.jsonl", list(reversed(pairs(80))))
    assert one == two == mixed("6", prompts=[f"{a}@50%", f"{b}@50%"], max_prompts=20)[2]


def test_shares_that_make_no_sense_are_told(tmp_path: Path) -> None:
    for prompts, most, message in [
        (["a@50%", "b"], 9, "for all sources or none"), (["a@50%", "b@30%"], 9, "sum to 100 % \\(here 80.0%\\)"), (["a@100%"], 0, "need max_prompts"),
    ]:  # fmt: skip
        with pytest.raises(ParamError, match=message):
            prepare.Options(prompts=prompts, max_prompts=most)
    assert [(p.name, p.cap, p.share) for p in prepare.Options(prompts=["a@b.jsonl", "c@7", "d@7x"]).mix()] == [
        ("a@b.jsonl", None, None), ("c", 7, None), ("d@7x", None, None)]  # fmt: skip
    (tmp_path / "data@2024").mkdir()
    assert prepare.Options(prompts=str(tmp_path / "data@2024")).mix()[0].name == str(tmp_path / "data@2024")


def test_lines_that_cannot_be_read_stop_the_work_or_are_counted(tmp_path: Path, chat: Chat) -> None:
    bad = [b"{\'prompt\': 1}", b"{\"prompt\": \"half", b"{\"prompt\": \"\xff\"}", b"[" * 5000, b"{\"n\": " + b"7" * 5000 + b"}", b"\x00\x00", b"}{"]
    good = b"".join(b"\n{\"prompt\": \"q%d\", \"response\": \"r s\"}\n" % i for i in range(3))
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(bad) + good)
    for most in (0, 50):
        options = prepare.Options(prompts=str(tmp_path / "a.jsonl"), answer="data", max_prompts=most)
        with pytest.raises(Eagle3Error, match=r"a\.jsonl:1: broken JSON.*or set broken_records to \"drop\""):
            prepare.build(prepare.load(options), chat, tmp_path)
        about = prepare.build(prepare.load(replace(options, broken_records="drop")), chat, tmp_path).about
        assert (about["rows_in"], about["rows_kept"], about["dropped"]) == (10, 3, {BROKEN: 7})
        assert about["examples"][BROKEN].startswith(f"{tmp_path}/a.jsonl:1: broken JSON: Expecting property name")


@pytest.mark.parametrize(
    "prompts",
    ["a@nan%", ["a@inf%", "b@-inf%"], ["a@-10%", "b@110%"], "x" * 300, "x" * 300 + "@5", "~no-such-user/x", ["~no-such-user/x@100%"]],
    ids=["nan", "inf", "negative", "long", "long with a cap", "nobody's home", "nobody's home with a share"],
)
def test_a_source_or_share_that_cannot_be_is_a_wrong_parameter(prompts: str | list[str]) -> None:
    with pytest.raises(ParamError):
        prepare.load(prepare.Options(prompts=prompts))
