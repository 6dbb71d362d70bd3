"""The prepared rows: identity, split, order, and a folder that appears whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import templates
import xxhash
from preparing import answered, pairs, shown, talk

from eagle3lib import prepare, prepared
from eagle3lib.chat import Chat
from eagle3lib.errors import Eagle3Error
from eagle3lib.preview import View
from eagle3lib.rows import Row


@pytest.fixture
def chat() -> Chat:
    return Chat(templates.bytes_of("chatml"))


# identity, split, order --------------------------------------------------------------------------------------------


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
