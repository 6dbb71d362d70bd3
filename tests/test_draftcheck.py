"""The validator names every single mutation of a draft folder, and leaves good ones alone."""

from __future__ import annotations

import json

import pytest
import torch
from drafts import OPTIONS, small_draft
from safetensors.torch import load_file, save_file

from eagle3lib import draftcheck, export, layouts
from eagle3lib.draft import Draft, DraftConfig
from eagle3lib.errors import Eagle3Error

TENSORS = [n for n in small_draft().exported() if n not in ("d2t", "t2d")]
FIELDS = list(draftcheck.FIELDS)


@pytest.fixture()
def folder(tmp_path):
    return export.export(small_draft(), tmp_path / "draft", dtype="float32")


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")


def change_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def named(folder, target=None):
    return {p.where for p in draftcheck.check_draft(folder, target)}


def errors(folder, target=None):
    return [str(p) for p in draftcheck.check_draft(folder, target) if p.fatal]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_our_own_export_has_no_problem(tmp_path, dtype):
    assert draftcheck.check_draft(export.export(small_draft(), tmp_path / "draft", dtype=dtype)) == []


@pytest.mark.parametrize("name", TENSORS)
def test_a_missing_tensor_is_named(folder, name):
    change_tensors(folder, lambda t: t.pop(name))
    assert errors(folder) == [f"error: {name}: missing; the engine leaves it at random values"]


@pytest.mark.parametrize("name", TENSORS)
def test_a_renamed_tensor_is_named_under_both_names(folder, name):
    change_tensors(folder, lambda t: t.update({f"draft.{name}": t.pop(name)}))
    assert named(folder) == {name, f"draft.{name}"} and len(errors(folder)) == 2


@pytest.mark.parametrize("name", TENSORS)
def test_a_misshapen_tensor_is_named(folder, name):
    change_tensors(folder, lambda t: t.update({name: t[name][:-1]}))
    assert named(folder) == {name} and "the config says" in errors(folder)[0]


@pytest.mark.parametrize("name", [n for n, t in small_draft().exported().items() if t.dim() == 2])
def test_a_transposed_tensor_is_named(folder, name):
    change_tensors(folder, lambda t: t.update({name: t[name].t()}))
    assert named(folder) == {name}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_named(folder, name, value):
    change_tensors(folder, lambda t: t[name].view(-1)[3].fill_(value))
    assert errors(folder) == [f"error: {name}: 1 of {small_draft().exported()[name].numel():,} values are NaN or infinite"]


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_still_at_its_initial_value_is_named(folder, name):
    value = 1.0 if "norm" in name else 0.0
    change_tensors(folder, lambda t: t[name].fill_(value))
    problems = draftcheck.check_draft(folder)
    assert [p.where for p in problems] == [name] and "before any training" in problems[0].text
    assert problems[0].fatal == ("norm" not in name)


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(folder, field):
    change_config(folder, lambda c: c.pop(field))
    assert field in named(folder)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", ["7 or so", -3, [], True])
def test_a_field_of_a_wrong_kind_is_named(folder, field, value):
    change_config(folder, lambda c: c.update({field: value}))
    assert any(p.where == field and p.fatal for p in draftcheck.check_draft(folder))


@pytest.mark.parametrize("field", [*draftcheck.SIZES])
def test_a_size_that_the_tensors_do_not_have_is_named(folder, field):
    change_config(folder, lambda c: c.update({field: 2 * c[field]}))
    assert any(field in text for text in errors(folder))


@pytest.mark.parametrize(("field", "value"), [
    ("architectures", ["LlamaForCausalLM"]), ("num_hidden_layers", 2), ("hidden_act", "gelu"), ("tie_word_embeddings", True),
    ("attention_bias", True), ("torch_dtype", "float8"), ("rms_norm_eps", 0.5), ("rope_scaling", {"factor": 8.0}), ("rope_theta", None)])
def test_a_field_that_changes_the_forward_is_named(folder, field, value):
    change_config(folder, lambda c: c.update({field: value}))
    assert any(text.startswith(f"error: {field}: ") for text in errors(folder))


ROPES = [{"rope_type": "nonsense"}, {"rope_type": []}, {"type": "linear"}, {"rope_type": "linear", "factor": -3},
         {"rope_type": "yarn", "factor": 0}, {"rope_type": "dynamic", "factor": "8"},
         {"rope_type": "llama3", "factor": 8.0}, {"rope_type": "longrope", "short_factor": []}, {"factor": 2.0}]


@pytest.mark.parametrize("scaling", ROPES, ids=str)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_a_rope_of_which_no_frequencies_can_be_made_is_named(folder, place, scaling):
    base = {"rope_theta": 10000.0} if place == "rope_parameters" else {}
    change_config(folder, lambda c: (c.pop("rope_scaling"), c.update({place: {**scaling, **base}})))
    assert ("rope_scaling" in "".join(errors(folder))) == (scaling != {"factor": 2.0} or place == "rope_scaling")


@pytest.mark.parametrize(("change", "where"), [
    (lambda c: c.update(rope_parameters={"rope_type": "default", "rope_theta": 7.0}), "rope_theta"),
    (lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}), "rope_theta"),
    (lambda c: c.update(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "linear", "factor": 3.0}), "rope_scaling"),
    (lambda c: c.update(rope_parameters=[1]), "rope_parameters"),
    (lambda c: c.update(rope_parameters={"rope_type": "default"}), None),
    (lambda c: (c.pop("rope_scaling"), c.update(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": c.pop("rope_theta")})), None)])
def test_two_places_that_say_different_things_of_the_rope_are_named(folder, change, where):
    change_config(folder, change)
    assert {p.where for p in draftcheck.check_draft(folder)} == ({where} if where else set())


def d2t_of(ids):
    return torch.tensor(ids) - torch.arange(len(ids))


VOCABULARY = {
    "ids instead of offsets": ("d2t", lambda t: t.update(d2t=t["t2d"].nonzero().flatten()), "must hold offsets"),
    "int32": ("d2t", lambda t: t.update(d2t=t["d2t"].int()), "must be int64"),
    "beyond the vocabulary": ("d2t", lambda t: t["d2t"][-1].add_(40), "the vocabulary is 0..39"),
    "negative": ("d2t", lambda t: t["d2t"][0].sub_(9), "leads to target ids -"),
    "twice the same id": ("d2t", lambda t: t["d2t"][5].copy_(t["d2t"][4] - 1), "do not ascend"),
    "descending": ("d2t", lambda t: t.update(d2t=d2t_of(t["t2d"].nonzero().flatten().flip(0).tolist())), "do not ascend"),
    "too short": ("d2t", lambda t: t.update(d2t=t["d2t"][:-1]), "draft_vocab_size"),
    "no d2t": ("d2t", lambda t: t.pop("d2t"), "missing"),
    "no t2d": ("t2d", lambda t: t.pop("t2d"), "missing"),
    "t2d of integers": ("t2d", lambda t: t.update(t2d=t["t2d"].int()), "must be bool"),
    "t2d too short": ("t2d", lambda t: t.update(t2d=t["t2d"][:-1]), "vocab_size"),
    "t2d of other tokens": ("t2d", lambda t: t.update(t2d=~t["t2d"]), "not the 30 that d2t leads to"),
    "t2d with one more": ("t2d", lambda t: t["t2d"].index_fill_(0, (~t["t2d"]).nonzero()[0], True), "marks 31 tokens"),
}


@pytest.mark.parametrize("case", VOCABULARY)
def test_a_wrong_draft_vocabulary_is_named(folder, case):
    where, change, text = VOCABULARY[case]
    change_tensors(folder, change)
    problems = draftcheck.check_draft(folder)
    assert {p.where for p in problems} == {where} and text in problems[0].text


@pytest.mark.parametrize(("change", "where"), [
    (lambda e: e.pop("eagle_aux_hidden_state_layer_ids"), "eagle_aux_hidden_state_layer_ids"),
    (lambda e: e.update(eagle_aux_hidden_state_layer_ids=[1, 2]), "fc.weight"),
    (lambda e: e.update(eagle_aux_hidden_state_layer_ids=[2, 1, 0]), "eagle_aux_hidden_state_layer_ids"),
    (lambda e: e.update(eagle_aux_hidden_state_layer_ids=["0", "1", "2"]), "eagle_aux_hidden_state_layer_ids"),
    (lambda e: e.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3]), "residual_streams"),
    (lambda e: e.update(use_aux_hidden_state=False), "use_aux_hidden_state"),
    (lambda e: e.pop("use_aux_hidden_state"), "use_aux_hidden_state"),
])
def test_wrong_captured_layers_are_named(folder, change, where):
    change_config(folder, lambda c: change(c["eagle_config"]))
    assert where in named(folder)


def test_several_problems_come_together_errors_first(folder):
    change_tensors(folder, lambda t: (t.pop("fc.weight"), t["norm.weight"].fill_(1.0)))
    change_config(folder, lambda c: c.pop("head_dim"))
    found = draftcheck.check_draft(folder)
    assert [p.fatal for p in found] == sorted((p.fatal for p in found), reverse=True)
    assert {"fc.weight", "norm.weight", "head_dim"} <= {p.where for p in found}


@pytest.mark.parametrize("content", ["", "{", "[1]", None])
def test_an_unreadable_config_is_one_clear_error(folder, content):
    (folder / "config.json").unlink() if content is None else (folder / "config.json").write_text(content)
    with pytest.raises(Eagle3Error, match="config.json"):
        draftcheck.check_draft(folder)


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_bytes(f.read_bytes()[:200]), lambda f: f.write_bytes(b"junk")])
def test_damaged_weights_are_named(folder, damage):
    damage(folder / "model.safetensors")
    assert "model.safetensors" in named(folder)


def test_pickled_weights_are_not_opened(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert any("pytorch_model.bin is pickled and not read" in text for text in errors(folder))


def test_the_other_spelling_of_names_is_a_good_draft_too(folder):
    change_tensors(folder, lambda t: [t.update({"model." + n.replace("midlayer", "layers.0"): t.pop(n)}) for n in list(t) if "norm" in n])
    assert draftcheck.check_draft(folder) == []


def test_the_same_tensor_under_two_names_is_named(folder):
    change_tensors(folder, lambda t: t.update({"model.fc.weight": t["fc.weight"].clone()}))
    assert any("is there twice" in text for text in errors(folder))


def test_norms_on_the_captured_layers_belong_to_eagle_3_1(folder):
    change_tensors(folder, lambda t: t.update({f"fc_norm.{n}.weight": torch.rand(16) for n in range(3)}))
    assert named(folder) == {f"fc_norm.{n}.weight" for n in range(3)}  # dropped without a word
    change_config(folder, lambda c: c.update(fc_norm=True))
    assert draftcheck.check_draft(folder) == []


# Options and layouts -------------------------------------------------------------------------------------------------

EVERYTHING = small_draft(**OPTIONS["everything"])


@pytest.fixture(params=["sglang", "vllm"])
def full(request, tmp_path):
    """A draft with every option: three layers, narrower than its target, norms before fc, normed output."""
    return export.export(EVERYTHING, tmp_path / "full", dtype="float32", layout=request.param)


def test_a_draft_with_every_option_has_no_problem(full):
    assert draftcheck.check_draft(full) == []


@pytest.mark.parametrize("place", range(len(EVERYTHING.exported()) - 2))
@pytest.mark.parametrize("change", ["gone", "renamed", "misshapen", "constant"])
def test_every_tensor_of_every_option_is_watched(full, place, change):
    names = sorted(n for n in load_file(full / "model.safetensors") if n not in ("d2t", "t2d"))
    name = names[place]
    ours = [n for n in EVERYTHING.exported() if layouts.file_name(n, layouts.of(draftcheck.read_config(full))) == name][0]
    change_tensors(full, {"gone": lambda t: t.pop(name), "renamed": lambda t: t.update({f"draft.{name}": t.pop(name)}),
                          "misshapen": lambda t: t.update({name: t[name][:-1]}), "constant": lambda t: t[name].zero_()}[change])
    assert any(p.fatal and p.where == ours for p in draftcheck.check_draft(full))


@pytest.mark.parametrize("field", sorted({*export.engine_config(EVERYTHING.cfg, "float32"), "norm_before_residual"}))
def test_every_field_that_an_export_writes_is_missed(full, field):
    if field in ("norm_before_residual",):
        change_config(full, lambda c: c.update({field: True}))
        assert (field in named(full)) == (layouts.of(draftcheck.read_config(full)) is layouts.VLLM)
        return
    change_config(full, lambda c: c.pop(field))
    assert field in named(full)


@pytest.mark.parametrize("field", ["use_aux_hidden_state", "residual_streams", "meaning", "norm_output"])
def test_every_field_inside_eagle_config_is_missed(full, field):
    change_config(full, lambda c: c["eagle_config"].pop(field))
    assert field in named(full)


@pytest.mark.parametrize(("change", "where"), [
    (lambda c: c.update(norm_output=False), "norm_output"), (lambda c: c.update(fc_norm=False), "fc_norm.0.weight"),
    (lambda c: c.update(num_hidden_layers=1), "num_hidden_layers"), (lambda c: c.update(num_hidden_layers=4), "num_hidden_layers"),
    (lambda c: c.update(target_hidden_size=12), "fc.weight"), (lambda c: c.update(hidden_size=48), "hidden_size")])
def test_options_that_the_file_does_not_have_are_named(full, change, where):
    change_config(full, change)
    assert any(p.fatal and p.where == where for p in draftcheck.check_draft(full))


def test_embeddings_that_sglang_would_not_take_are_warned_of(folder):
    change_tensors(folder, lambda t: t.update({"embed_tokens.weight": torch.randn(40, 16)}))
    assert [(p.where, p.fatal) for p in draftcheck.check_draft(folder)] == [("embed_tokens.weight", False)]


def test_the_speculators_layout_is_one_clear_error(folder):
    change_config(folder, lambda c: c.update(speculators_model_type="eagle3"))
    with pytest.raises(Eagle3Error, match="layout of the speculators package"):
        draftcheck.check_draft(folder)


@pytest.mark.parametrize(("ids", "fatal"), [([1, 3, 4], True), ([2, 4, 8], True), ([2, 3, 5], False), ([2, 4, 5], None)])
def test_captured_layers_of_a_vllm_folder_are_held_against_the_target(tiny, tmp_path, ids, fatal):
    draft = fitting_draft(tiny)
    folder = export.export(draft, tmp_path / "draft", dtype="float32", layout="vllm")
    change_config(folder, lambda c: (c.update({layouts.AUX_IDS: ids}), c["eagle_config"].update(residual_streams=ids)))
    assert [p.fatal for p in draftcheck.check_draft(folder, tiny)] == ([] if fatal is None else [fatal])


# With a target -------------------------------------------------------------------------------------------------------


def fitting_draft(tiny, **sizes):
    """A draft of the tiny target: 8 layers, streams 2, 4, 5."""
    from eagle3lib import targets

    config = DraftConfig.from_target(targets.text_config(tiny), 50, targets.capture_layers(8), **sizes)
    torch.manual_seed(0)
    draft = Draft(config, torch.arange(50), torch.arange(320).lt(100) & torch.arange(320).remainder(2).eq(0))
    for parameter in draft.parameters():
        parameter.data = torch.randn_like(parameter)
    return draft


@pytest.fixture()
def fitting(tmp_path, tiny):
    return export.export(fitting_draft(tiny), tmp_path / "fitting", dtype="float32")


def test_a_draft_of_another_width_fits_by_its_own_embeddings(tiny, tmp_path):
    folder = export.export(fitting_draft(tiny, hidden_size=48, train_embeddings=True), tmp_path / "draft", dtype="float32")
    assert draftcheck.check_draft(folder, tiny) == []
    change_tensors(folder, lambda t: t.pop("embed_tokens.weight"))
    assert {"embed_tokens.weight", "hidden_size"} <= {p.where for p in draftcheck.check_draft(folder, tiny) if p.fatal}


def test_a_fitting_draft_has_no_problem(fitting, tiny):
    assert draftcheck.check_draft(fitting, tiny) == []


@pytest.mark.parametrize(("change", "where", "fatal"), [
    (lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 4, 5]), "eagle_aux_hidden_state_layer_ids", True),
    (lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 3, 7]), "eagle_aux_hidden_state_layer_ids", True),
    (lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), "eagle_aux_hidden_state_layer_ids", False),
    (lambda c: c.update(vocab_size=319), "vocab_size", True),
    (lambda c: c.update(target_hidden_size=32), "target_hidden_size", True),
    (lambda c: c.update(hidden_size=32), "hidden_size", True),
    (lambda c: c.update(rope_theta=500000.0), "rope_theta", False),
    (lambda c: c.update(max_position_embeddings=512), "max_position_embeddings", False),
    (lambda c: c.update(rms_norm_eps=1e-3), "rms_norm_eps", False),
    (lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": 8.0}), "rope_scaling", False),
])
def test_a_draft_that_does_not_fit_is_named(fitting, tiny, change, where, fatal):
    change_config(fitting, change)
    assert any(p.where == where and p.fatal == fatal for p in draftcheck.check_draft(fitting, tiny))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("change", [lambda c: c.update(rope_scaling=None), lambda c: c.pop("rope_scaling"),
                                    *(lambda c, n=n, v=v: c["rope_scaling"].update({n: v}) for n, v in [
                                        ("factor", 32.0), ("low_freq_factor", 2.0), ("original_max_position_embeddings", 1024)])])
def test_a_rope_scaling_other_than_the_targets_is_named(tiny, tmp_path, change):
    """The target may say the same in another place and spelling; that is no problem."""
    folder, target = export.export(fitting_draft(tiny, rope_scaling=LLAMA3), tmp_path / "draft", dtype="float32"), tmp_path / "target"
    target.mkdir()
    for scaled in ({"rope_scaling": {**LLAMA3, "type": "llama3"}}, {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}):
        plain = {n: v for n, v in draftcheck.read_config(tiny).items() if not n.startswith("rope")}
        (target / "config.json").write_text(json.dumps({**plain, "rope_theta": 10000.0, **scaled}))
        assert draftcheck.check_draft(folder, target) == []
    change_config(folder, change)
    assert "rope_scaling" in named(folder, target)


def test_the_report_prints_every_problem_and_its_exit_code(fitting, tiny, capsys):
    assert draftcheck.report(fitting, tiny) == 0
    change_tensors(fitting, lambda t: t.pop("fc.weight"))
    assert draftcheck.report(fitting) == 1
    out = capsys.readouterr().out
    assert "error: fc.weight: missing" in out and "0 errors, 0 warnings" in out and "1 errors" in out


def test_require_raises_with_all_errors_and_passes_warnings_on(fitting, tiny):
    change_config(fitting, lambda c: c.update(rope_theta=5.0))
    assert [p.where for p in draftcheck.require(fitting, tiny)] == ["rope_theta"]
    change_tensors(fitting, lambda t: (t.pop("fc.weight"), t.pop("norm.weight")))
    with pytest.raises(Eagle3Error, match=r"2 error\(s\)(.|\n)*norm.weight"):
        draftcheck.require(fitting, tiny)
