"""What one step computes, as tensors: the model sees this, its weights and its state, and nothing else."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Batch:
    """T tokens in R chunks. All tensors are int64 on the model's device; -1 means none.

    A token's *row* is its place in the step, 0 .. T - 1. Window rows and pending rows of this step's tokens lie in
    the scratch part of their pools until `State.commit` copies the lists `*_source -> *_target` into frontier slots;
    until then a step changes no frontier.
    """

    ids: Tensor
    """[T] token ids; -1 where the id is the one that the request's last step sampled, still on the device."""
    positions: Tensor
    """[T] positions in their requests."""
    chunks: Tensor
    """[T] the chunk each token belongs to."""
    starts: Tensor
    """[R] position of each chunk's first token."""
    firsts: Tensor
    """[R] row of each chunk's first token."""
    slots: Tensor
    """[R] frontier slot of each chunk's request, which is also its row of the page table."""
    table_slots: Tensor
    """[U] page table cells to set before the step: the slot,"""
    table_columns: Tensor
    """[U] the page's number in the request,"""
    table_pages: Tensor
    """[U] and the page."""
    slot_copies: Tensor
    """[2, ...] frontiers to copy before the step, from slot to slot."""
    page_copies: Tensor
    """[2, ...] pages to copy before the step."""
    closing_rows: Tensor
    """[C, 8] pending rows of each CSA window that this step closes: the previous window's four, the own four."""
    closing_entries: Tensor
    """[C] where its entry and index key go: page * 32 + place."""
    closing_positions: Tensor
    """[C] the position of its first token."""
    piece_firsts: Tensor
    """[Q] row of the first token of each piece: the part of a chunk that lies in one HCA window."""
    piece_counts: Tensor
    """[Q] tokens in the piece."""
    piece_slots: Tensor
    """[Q] slot whose online softmax the piece goes on from; -1 for a piece that begins its window."""
    full_pieces: Tensor
    """[Z] the pieces that complete their window."""
    full_pages: Tensor
    """[Z] where the entry of such a window goes."""
    full_positions: Tensor
    """[Z] the position of its first token."""
    window_source: Tensor
    """[M] window rows (ring or scratch) to keep,"""
    window_target: Tensor
    """[M] and the ring rows that receive them."""
    pending_source: Tensor
    """[M'] CSA pending rows to keep,"""
    pending_target: Tensor
    """[M'] and the rows that receive them."""
    fold_source: Tensor
    """[M''] rows of HCA online softmaxes to keep,"""
    fold_target: Tensor
    """[M''] and the slots that receive them."""
    logit_rows: Tensor | None
    """[N] token rows whose logits are wanted; a row may stand more than once. None: all T, in order."""
    most_pages: int
    """The largest number of pages that a request of this step has."""
    most_csa_entries: int
    """The largest number of CSA entries that any token sees."""
    most_hca_entries: int
    """The same for HCA."""
    longest_piece: int
    """The largest of `piece_counts`."""
    expert_counts: Tensor | None = None
    """[L, E] how often each layer chose each expert, to be added to; None where nobody counts."""
    logits: Tensor | None = None
    """[N, V] fp32 where the logits go, if they have a place."""
