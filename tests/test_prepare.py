"""The prepared rows: identity, split, order, and a folder that appears whole."""

from __future__ import annotations

import ast
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import pytest
import templates
import xxhash
from preparing import answered, pairs, shown, talk

from eagle3lib import accounting, params, prepare, prepared, verify, vocab
from eagle3lib.chat import Chat
from eagle3lib.checks import Checks
from eagle3lib.errors import Eagle3Error
from eagle3lib.preview import View
from eagle3lib.store import sample_id


@pytest.fixture
def chat() -> Chat:
    return Chat(templates.bytes_of("chatml"))


# identity, split, order --------------------------------------------------------------------------------------------


def test_sample_id_is_the_hash_of_ids_and_mask(tmp_path: Path, chat: Chat) -> None:
    row = answered(tmp_path, chat, pairs(1)).rows[0]
    ids = b"".join(i.to_bytes(4, "little") for i in row["input_ids"])
    assert row["sample_id"] == xxhash.xxh3_128_hexdigest(ids + bytes(row["loss_mask"]))
    assert sample_id([1, 2], [False, True]) != sample_id([1, 2], [True, True])


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


# the folder --------------------------------------------------------------------------------------------------------


def test_unchanged_preparation_is_reused_and_any_change_makes_a_new_one(tmp_path: Path, chat: Chat) -> None:
    def made(chat: Chat = chat, **options: Any) -> tuple[str, int]:
        """(the preparation's key, when it was made)."""
        data = answered(tmp_path, chat, options.pop("records", pairs(5)), **options)
        return data.about["key"], (data.folder / "prepared.json").stat().st_mtime_ns

    first = made()
    assert made() == first == made(concurrency=3)
    keys, other = {first[0]}, Chat(templates.bytes_of("chatml"), fingerprint={"chat_template": "other"})
    for change in (dict(records=pairs(6)), dict(chat=other), dict(chat=Chat(templates.bytes_of("chatml"), stop_ids=[9])), *CHANGES):
        changed = made(**change)
        assert changed[0] not in keys, change
        assert made(**change) == changed, change
        keys.add(changed[0])
    assert made()[0] == first[0] and made()[1] != first[1]  # made anew: the folder held another


CHANGES: list[dict[str, Any]] = [
    {"max_tokens": 500}, {"max_prompts": 3}, {"heldout_share": 0.4}, {"seed": 1}, {"temperature": 0.5}, {"sampling_seed": 5}, {"truncated": "drop"},
    {"train_turns": "last"}, {"decontaminate": False}, {"near_duplicates": 0.9}, {"broken_records": "drop"}, {"max_new_tokens": 9},
]  # fmt: skip


def test_every_option_is_a_parameter_of_the_notebook_and_named_above() -> None:
    """What decides the rows can be set, reaches the options, and is part of a preparation's identity."""
    names = {field.name for field in fields(prepare.Options)}
    notebook = Path(__file__).parents[1] / "notebooks" / "01_prepare.ipynb"
    sources = ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    (call,) = [node for source in sources for node in ast.walk(ast.parse(source))
               if isinstance(node, ast.Call) and ast.unparse(node.func) == "prepare.Options"]  # fmt: skip
    assert {k.arg: ast.unparse(k.value) for k in call.keywords} == {name: name for name in names}
    declared = params.read_notebook(notebook)
    for field in fields(prepare.Options):
        assert declared[field.name].default == (["chitchat"] if field.name == "prompts" else field.default)
    assert names - {key for change in CHANGES for key in change} == {"prompts", "answer", "concurrency", "train_thinking"}  # tested elsewhere


def test_few_rows_and_many_give_the_same_folder(tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through buckets on disk, in several files, as in memory."""
    few = answered(tmp_path / "1", chat, pairs(300))
    monkeypatch.setattr(prepared, "_SPILL_TOKENS", 2000)
    monkeypatch.setattr(prepared, "_FILE_BYTES", 3000)
    many = answered(tmp_path / "2", chat, pairs(300))
    assert len(list(many.folder.glob("*.arrow"))) > 3 and len(list(few.folder.glob("*.arrow"))) == 1
    assert few.rows.to_list() == many.rows.to_list()
    assert datasets.load_from_disk(str(many.folder)).to_list() == many.rows.to_list()
    assert not list((tmp_path / "2").glob(".prepared*"))


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


# checks ------------------------------------------------------------------------------------------------------------


def checked(data: prepared.Prepared, chat: Chat, rows: Any = None) -> list[str]:
    """The names of the checks that fail."""
    checks = Checks()
    verify.check_prepared(checks, rows or data.rows, data.about, chat.generation_prompt)
    return [check.name for check in checks.failed]


STARTS = "replies start behind the generation prompt"


def test_shifted_masks_are_seen_and_lawful_ones_are_not_blamed(tmp_path: Path) -> None:
    tokenizer = templates.bytes_of("tools")
    tokenizer.add_tokens(["<think>", "</think>"])
    chat = Chat(tokenizer)
    thought = [talk(("user", f"q{i}"), ("assistant", f"<think>hm {i}</think>yes {i}"), ("user", "and"), ("assistant", "no")) for i in range(9)]
    data = answered(tmp_path, chat, [*pairs(9), *thought], heldout_share=0.5)
    assert checked(data, chat) == []
    shifted = datasets.Dataset.from_list([{**row, "loss_mask": [False, *row["loss_mask"][:-1]]} for row in data.rows])
    assert checked(data, chat, shifted) == [STARTS]
    without = answered(tmp_path, chat, [*pairs(9), *thought], heldout_share=0.5, train_thinking=False)
    assert checked(without, chat) == []
    early = datasets.Dataset.from_list([{**row, "loss_mask": [*row["loss_mask"][60:], *[True] * 60]} for row in without.rows])
    assert STARTS in checked(without, chat, early)
    own = answered(tmp_path, chat, [*pairs(9), {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}], heldout_share=0.5)
    assert own.about["own_starts"] == 1 and checked(own, chat) == []


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


def test_metrics_coverage_and_turns(tmp_path: Path, chat: Chat) -> None:
    long = talk(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "b d"))
    data = answered(tmp_path, chat, [*pairs(4), long])
    metrics = data.metrics()
    assert metrics["rows_in"] == metrics["rows_kept"] == 5
    assert metrics["tokens"] == sum(data.rows["n_tokens"]) and metrics["supervised_tokens"] == sum(map(sum, data.rows["loss_mask"]))
    assert data.about["replies"] == [[1, 4], [2, 1]]
    counts = vocab.count_supervised(data.rows["input_ids"], data.rows["loss_mask"], len(chat.tokenizer))
    assert data.about["coverage"] == [list(point) for point in vocab.coverage_curve(counts)]


def test_the_waterfall_adds_up_and_counts_no_sampling_as_a_loss() -> None:
    counts = {"records_read": 26053, "not_sampled": 25638, "rows_split": 5, "dropped": {"duplicate": 14, "empty reply": 6}, "rows_kept": 400}
    lines = accounting.waterfall(counts)
    assert lines[0] == ("chosen of 26,053 records", 415, 415) and lines[-1] == ("rows kept", 400, 400)
    assert [now for _, _, now in lines] == [415, 420, 406, 400, 400]
    assert accounting.waterfall(counts | {"not_sampled": 0})[0][0] == "records read"
