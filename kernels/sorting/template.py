"""The TileLang program of `sort_block`: one block counts and places all routes, the others zero the buffer.

The block's threads share a board of counters, one per expert. They count the routes of each expert, one thread lays the
runs out, all fill the lists with padding, and then each route takes the next free row of its expert's run. On GPUs that
is an atomic addition, so the order within a run is that of chance; on the C target there is one thread, and it is by
token.
"""
# No "from __future__ import annotations" here: TileLang reads the annotations of a traced function as values.
# mypy: disable-error-code="valid-type,name-defined"

from dataclasses import dataclass
from typing import Any

from kernels.dialect import Dialect

TOKEN_BITS = 24
_ABSENT = -1  # number of an expert that lives elsewhere, and of a block behind the valid ones
_SPAN = 8  # elements of the buffer that one thread zeroes


@dataclass(frozen=True)
class Spec:
    """One compiled kernel. Tokens, slots (flat), experts, the block's rows and the buffer's size stay dynamic.

    target: "cuda", "hip" or "c". board: experts that fit. word: integer type by which the buffer is zeroed, "uint16" or
    "int32". threads: per block.
    """

    target: str
    board: int
    word: str
    threads: int

    def __str__(self) -> str:
        return f"sort_block[board:{self.board} {self.word} threads:{self.threads}]"


def build(spec: Spec) -> Any:
    """The TileLang program of one specialisation. ``mask`` has one entry, unused, where ``masked`` is 0."""
    import tilelang.language as T

    dialect = Dialect(spec.target)
    step = spec.threads
    slots, entries, blocks, words = (T.dynamic(name) for name in ("slots", "entries", "blocks", "words"))
    slots_type, weights_type = T.Tensor((slots,), "int32"), T.Tensor((slots,), "float32")
    mask_type = T.Tensor((T.dynamic("known"),), "int32")
    ids_type, shares_type = T.Tensor((entries,), "int32"), T.Tensor((entries,), "float32")
    owners_type, valid_type = T.Tensor((blocks,), "int32"), T.Tensor((2,), "int32")
    words_type = T.Tensor((words,), spec.word)

    @T.macro
    def lay_out(number, count, first, valid, tokens, experts, block):
        """One thread: numbers of local experts and the first row of each run; ``first`` gets one entry more."""
        local = T.alloc_var("int32")
        row = T.alloc_var("int32")
        local = 0
        row = 0
        for e in T.serial(experts):
            first[e] = row
            if number[e] != _ABSENT:
                number[e] = local
                local = local + 1
                row = row + T.ceildiv(count[e], block) * block
        first[experts] = row
        valid[0] = row
        valid[1] = tokens

    @T.macro
    def sort(topk_ids, topk_weights, mask, ids, shares, owners, valid, tokens, topk, experts, block, masked, thread):
        number = dialect.board(spec.board + 1, "int32")
        count = dialect.board(spec.board + 1, "int32")
        first = dialect.board(spec.board + 1, "int32")
        expert = T.alloc_var("int32")
        row = T.alloc_var("int32")
        last = T.alloc_var("int32")
        for n in T.serial(T.ceildiv(experts, step)):
            if n * step + thread < experts:
                count[n * step + thread] = 0
                expert = 1
                if masked != 0:
                    expert = mask[n * step + thread]
                number[n * step + thread] = T.if_then_else(expert != 0, 0, _ABSENT)
        dialect.barrier()
        for n in T.serial(T.ceildiv(slots, step)):
            if n * step + thread < slots:
                expert = topk_ids[n * step + thread]
                if expert >= 0 and expert < experts:
                    if dialect.gpu:
                        T.atomic_add(count[expert], 1)
                    else:
                        count[expert] = count[expert] + 1
        dialect.barrier()
        if thread == 0:
            lay_out(number, count, first, valid, tokens, experts, block)
        dialect.barrier()
        for n in T.serial(T.ceildiv(entries, step)):
            if n * step + thread < entries:
                ids[n * step + thread] = (topk << TOKEN_BITS) | tokens
                shares[n * step + thread] = 0.0
        for n in T.serial(T.ceildiv(blocks, step)):
            if (n * step + thread < blocks) and ((n * step + thread) * block >= first[experts]):
                owners[n * step + thread] = _ABSENT
        for n in T.serial(T.ceildiv(experts, step)):
            if n * step + thread < experts:
                count[n * step + thread] = 0
                expert = number[n * step + thread]
                row = first[n * step + thread] // block
                last = first[n * step + thread + 1] // block  # a loop's extent may not read shared memory itself
                for b in T.serial(last - row):
                    owners[row + b] = expert
        dialect.barrier()
        for n in T.serial(T.ceildiv(slots, step)):
            if n * step + thread < slots:
                expert = topk_ids[n * step + thread]
                row = _ABSENT
                if expert >= 0 and expert < experts:
                    row = number[expert]
                if row != _ABSENT:
                    if dialect.gpu:
                        row = T.atomic_add(count[expert], 1, return_prev=True)
                    else:
                        row = count[expert]
                        count[expert] = row + 1
                    row = row + first[expert]
                    ids[row] = (((n * step + thread) % topk) << TOKEN_BITS) | ((n * step + thread) // topk)
                    shares[row] = topk_weights[n * step + thread]

    @T.macro
    def zero(buffer, first_word):
        for s in T.serial(_SPAN):
            if first_word + s * step < words:
                buffer[first_word + s * step] = T.cast(0, spec.word)

    @T.prim_func
    def sort_block(topk_ids: slots_type, topk_weights: weights_type, mask: mask_type, ids: ids_type,
                   shares: shares_type, owners: owners_type, valid: valid_type, buffer: words_type, tokens: T.int32,
                   topk: T.int32, experts: T.int32, block: T.int32, masked: T.int32):
        with dialect.launch(T.ceildiv(words, step * _SPAN) + 1, threads=step) as at:
            thread = dialect.thread()
            if at == 0:
                sort(topk_ids, topk_weights, mask, ids, shares, owners, valid, tokens, topk, experts, block, masked,
                     thread)
            else:
                zero(buffer, (at - 1) * _SPAN * step + thread)

    return sort_block
