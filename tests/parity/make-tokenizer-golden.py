#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/tokenizer-golden.txt from tests/data/tokenizer-text.txt with the reference tokenizer.

    make-tokenizer-golden.py MODEL.gguf [TEXT [GOLDEN]]

The reference is the `tokenizers` library on the vocabulary that Transformers reads from the GGUF, with SmolLM2's own pre-tokenizer
(Digits, then ByteLevel), which the conversion from GGUF leaves out.  Bytes that are not UTF-8 are outside the reference: the text is cut at each,
and it becomes the token of the byte, or those of U+FFFD (daemon/text/tokenizer.h).

A line of the golden file is for a line of the text: number of ids and FNV-1a (64 bit, over little-endian int32) of them as ordinary text, then the same
with special tokens parsed, or "=" when equal.  Lines whose number is a multiple of 40 carry the ids as well (ordinary text).  The last
line is for the whole file as one text.
"""

import pathlib
import struct
import sys

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer


def fnv(ids):
    h = 0xCBF29CE484222325
    for b in struct.pack(f"<{len(ids)}i", *ids):
        h = (h ^ b) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def byte_map():
    plain = list(range(0x21, 0x7F)) + list(range(0xA1, 0xAD)) + list(range(0xAE, 0x100))
    rest = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


class Reference:
    def __init__(self, model):
        model = pathlib.Path(model)
        self.backend = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).backend_tokenizer
        self.backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
        self.vocabulary, self.map = self.backend.get_vocab(), byte_map()

    def encode(self, data, special):
        self.backend.encode_special_tokens = not special
        ids, run = [], ""
        for c in data.decode("utf-8", "surrogateescape") + "\udc00":
            if not 0xDC00 <= ord(c) <= 0xDCFF:
                run += c
                continue
            ids += self.backend.encode(run, add_special_tokens=False).ids
            run = ""
            if c != "\udc00":
                id_ = self.vocabulary.get(self.map[ord(c) - 0xDC00])
                ids += self.backend.encode("\ufffd", add_special_tokens=False).ids if id_ is None else [id_]
        return ids


def main(model, text, golden):
    reference = Reference(model)
    data = pathlib.Path(text).read_bytes()
    lines = data.split(b"\n")[:-1]
    out = []
    for number, line in enumerate(lines + [data]):
        plain, special = reference.encode(line, False), reference.encode(line, True)
        fields = [str(len(plain)), fnv(plain)] + (["="] if plain == special else [str(len(special)), fnv(special)])
        if number % 40 == 0 and number < len(lines):
            fields += [":"] + [str(i) for i in plain]
        out.append(" ".join(fields))
    pathlib.Path(golden).write_text("\n".join(out) + "\n")
    print(len(lines), "lines")


data_folder = pathlib.Path(__file__).parent.parent / "data"
arguments = sys.argv[1:] + [data_folder / "tokenizer-text.txt", data_folder / "tokenizer-golden.txt"][max(0, len(sys.argv) - 2):]
main(*arguments)
