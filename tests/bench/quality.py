#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How far logits are from the float32 oracle: mean KL divergence, its 99th percentile, share of equal top tokens.

    quality.py compare ORACLE.npy LOGITS [LOGITS…] [--first 256] [--last 2048]
        LOGITS: float32 [tokens, vocab] as .npy (`leat eval`), or raw as .f32 (any other program: the peer is judged by the same lines).

    quality.py table --model MODEL.gguf --python PYTHON [--leat LEAT] [--name NAME] [--work FOLDER] [--cache KEY=VALUE,… …]
        Makes ids and oracle logits of two texts under tests/data (with PYTHON, a virtual environment as make-oracle.py wants it; kept in
        FOLDER for the next time), runs `leat eval -m NAME` (a running daemon, see `make shell`) for every --cache, prints one line each.

KL divergence is of the oracle's distribution from ours, at positions [first, last) of a text: the beginning, where every cache is still in
full precision, is left out.  Needs numpy.
"""

import argparse
import os
import subprocess

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
TEXTS = ("text-alice.txt", "text-notes.txt")
ORACLE = os.path.join(HERE, "..", "parity", "make-oracle.py")
ROWS_AT_ONCE = 64


def load(path, n_vocab=None):
    if path.endswith(".f32"):
        return np.memmap(path, dtype=np.float32, mode="r").reshape(-1, n_vocab)
    return np.load(path, mmap_mode="r")


def log_softmax(x):
    x = x.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def divergence(oracle, ours, first, last):
    """(mean KLD, 99 % KLD, share of equal top tokens) over positions [first, last)."""
    last = min(last, len(oracle))
    if ours.shape[1] != oracle.shape[1] or len(ours) < last:
        raise SystemExit(f"shapes differ: oracle {oracle.shape}, logits {ours.shape}")
    kld, same = [], 0
    for start in range(first, last, ROWS_AT_ONCE):
        rows = slice(start, min(start + ROWS_AT_ONCE, last))
        p, q = log_softmax(oracle[rows]), log_softmax(ours[rows])
        if not np.isfinite(q).all():
            raise SystemExit(f"logits are not finite at positions {rows.start} to {rows.stop}")
        kld.append((np.exp(p) * (p - q)).sum(axis=1))
        same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
    kld = np.concatenate(kld)
    return kld.mean(), np.quantile(kld, 0.99), same / len(kld)


def line(label, result):
    print(f"{label:60s} KLD {result[0]:.5f}   99 % {result[1]:.4f}   same top {100 * result[2]:.2f} %", flush=True)


def oracle_of(args, text):
    """Ids and oracle logits of a text, made once."""
    base = os.path.join(args.work, os.path.splitext(text)[0])
    ids, npy = base + ".ids", base + ".oracle.npy"
    make = [args.python, ORACLE, args.model, "--threads", str(os.cpu_count())]
    if not os.path.exists(ids):
        out = subprocess.run(make + ["--tokenize", os.path.join(HERE, "..", "data", text), "--limit", str(args.last)], check=True,
                             stdout=subprocess.PIPE).stdout
        with open(ids + ".new", "wb") as file:
            file.write(out)
        os.rename(ids + ".new", ids)
    if not os.path.exists(npy):
        subprocess.run(make + ["--ids", ids, "--npy", npy + ".new.npy"], check=True)
        os.rename(npy + ".new.npy", npy)
    return ids, npy


def table(args):
    os.makedirs(args.work, exist_ok=True)
    for text in TEXTS:
        ids, npy = oracle_of(args, text)
        oracle, out = load(npy), os.path.join(args.work, "leat.npy")
        for cache in args.cache or [""]:
            command = [args.leat, "eval", "-m", args.name, "--ids", ids, "--npy", out] + (["--cache", cache] if cache else [])
            subprocess.run(command, check=True)
            line(f"{text}: {cache or 'default'}", divergence(oracle, load(out), args.first, args.last))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("compare")
    one.add_argument("oracle")
    one.add_argument("logits", nargs="+")
    many = verbs.add_parser("table")
    many.add_argument("--model", required=True)
    many.add_argument("--python", required=True)
    many.add_argument("--leat", default="leat")
    many.add_argument("--name", default="smollm2")
    many.add_argument("--work", default=os.path.join(HERE, "..", "..", "build", "quality"))
    many.add_argument("--cache", action="append")
    for sub in (one, many):
        sub.add_argument("--first", type=int, default=256)
        sub.add_argument("--last", type=int, default=2048)
    args = parser.parse_args()
    if args.verb == "table":
        return table(args)
    oracle = load(args.oracle)
    for path in args.logits:
        line(os.path.basename(path), divergence(oracle, load(path, oracle.shape[1]), args.first, args.last))


if __name__ == "__main__":
    main()
