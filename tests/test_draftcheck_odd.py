"""Draft folders as nobody should write them: named, in a second and a few lines, never a traceback."""

from __future__ import annotations

import json

import pytest
import torch
from drafts import small_draft
from test_draftcheck import change_config, change_tensors, errors, fitting_draft, named

from eagle3lib import draftcheck, export, layouts
from eagle3lib.errors import Eagle3Error

DTYPES = [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]


@pytest.fixture(params=["sglang", "vllm"])
def folder(request, tmp_path):
    return export.export(small_draft(num_layers=2), tmp_path / "draft", dtype="float32", layout=request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["t2d", "d2t", "fc.weight"])
def test_a_tensor_stored_in_any_other_format_is_named(folder, name, dtype):
    change_tensors(folder, lambda t: t.update({name: t[name].float().abs().to(dtype)}))
    assert name in named(folder)


@pytest.mark.parametrize("layers", [3, 10**5, 10**15])
def test_layers_that_are_missing_whole_are_one_problem(folder, layers):
    change_config(folder, lambda c: c.update(num_hidden_layers=layers))
    assert [text for text in errors(folder) if "num_hidden_layers" in text] == [
        f"error: num_hidden_layers: is {layers}, the file holds 2 layers"]
    assert len(errors(folder)) < 15


@pytest.mark.parametrize("ids", [[3, 2, 1], ["1", "2", "3"], [], "1,2,3", 7, {}, [-1, 2, 3], [1.0, 2.0, 3.0]])
@pytest.mark.parametrize("eagle", [None, {}, {"use_aux_hidden_state": True}])
def test_wrong_layer_ids_at_the_top_level_are_named_with_and_without_eagle_config(folder, ids, eagle):
    change_config(folder, lambda c: c.update({"eagle_config": eagle, layouts.AUX_IDS: ids}) or (c if eagle is not None else c.pop("eagle_config")))
    assert any(p.where == layouts.AUX_IDS and p.fatal for p in draftcheck.check_draft(folder))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, '{"a":' * 200_000 + "1" + "}" * 200_000, '{"hidden_size": ' + "9" * 5000 + "}"])
@pytest.mark.parametrize("whose", ["draft", "target"])
def test_a_config_nested_without_end_is_one_clear_error(folder, tmp_path, text, whose):
    target = tmp_path / "target"
    target.mkdir()
    ((folder if whose == "draft" else target) / "config.json").write_text(text)
    with pytest.raises(Eagle3Error, match=r"config.json is no JSON"):
        draftcheck.check_draft(folder, target)


@pytest.mark.parametrize("inner", [[1], "x", 7, True])
def test_a_target_whose_text_config_holds_no_fields_is_one_clear_error(tiny, tmp_path, inner):
    folder, target = export.export(fitting_draft(tiny), tmp_path / "draft", dtype="float32"), tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**draftcheck.read_config(tiny), "text_config": inner}))
    with pytest.raises(Eagle3Error, match=f"text_config is a {type(inner).__name__}, not fields"):
        draftcheck.check_draft(folder, target)
