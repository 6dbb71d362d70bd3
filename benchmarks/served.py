"""Does the acceptance length survive serving, and what does it bring? SGLang with a run's exported draft, beside the lossless loop.

    python benchmarks/served.py runs/latest --steps 3 --prompts 24 --tokens 128         needs a GPU: SGLang cannot speculate on a CPU
    python benchmarks/served.py runs/latest --steps 5 --topk 4 --verify 16              a tree, as SGLang counts: depth, top-k, tokens

The notebook 05_evaluate does the same within a run. Prints the verdict, the figures a set, speed at batch 1 and at the working batch,
the tested causes of a difference, and all checks; `--out FILE` writes the numbers as JSON.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from eagle3lib import agreement, checkpoint, evaluate, questions, runs, served, targets
from eagle3lib.acceptance import Shape
from eagle3lib.chat import Chat
from eagle3lib.checks import Checks

SETS = ["mtbench", "humaneval", "gsm8k"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--sets", nargs="+", default=SETS)
    for name, default in (("steps", 3), ("topk", 1), ("verify", 0), ("prompts", 24), ("tokens", 128), ("batch", 32), ("turns", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-graphs", action="store_true", help="start without CUDA graphs: quick, and no speed-up means anything")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(served.NO_GPU)
    target, shape = targets.resolve(args.target), Shape(args.steps, args.topk, args.verify)
    chat, model = Chat.of(target), targets.load_model(target, device="cuda")
    draft = checkpoint.load(args.run / "checkpoint", target).to("cuda")
    asked = questions.choose(args.sets, args.prompts, chat, room=questions.room(model, args.tokens, args.steps), turns=args.turns, run=args.run)
    results = evaluate.measure(model, draft, asked, chat, steps=args.steps, max_new_tokens=args.tokens)
    evaluate.vary(model, draft, results, chat, max_new_tokens=args.tokens, shape=shape)
    exported = evaluate.export_draft(draft, args.run / "serving" / "draft", target, results)
    serving = served.serve(exported.folder, target, results.questions, shape, args.run / "serving", max_new_tokens=args.tokens,
                           stop_ids=chat.stop_ids, batch=args.batch, cuda_graphs=not args.no_graphs, idle=[model, draft])
    agreed, checks = agreement.compare(results, serving, exported, model, draft), Checks()
    for part in (exported, serving, agreed):
        part.check(checks)
    evaluate.check(checks, results)
    evaluate.judge(checks, results)
    print(agreed.headline, agreed.table(), results.table(), serving.table(), agreed.causes(), checks.table(), sep="\n\n")
    if args.out:
        runs.write_json(args.out, {**results.metrics(), **serving.metrics(), **agreed.metrics(), "checks": checks.records})


if __name__ == "__main__":
    main()
