"""The sharded operators on threads in lock-step against torch's own on the whole tensor, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autoplan.lockstep import run_lockstep
from runtime.random import RandomState, use_state
from runtime.sharded_ops import attention, batch_norm, dropout, sync_batch_norm, vocab_cross_entropy, vocab_embedding

STATE = RandomState(seed=1, step=2, micro_batch=0)
EXACT = RandomState(seed=1, step=2, micro_batch=0, exact=True)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-12) -> bool:
    return found.shape == wanted.shape and (found - wanted).norm().item() <= tolerance * max(wanted.norm().item(), 1e-30)


def leaf(*shape: int, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) + shift).requires_grad_()


def copy(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


class TestBatchNorm:
    def test_it_is_torchs_and_leaves_its_arguments_alone(self):
        x, weight, bias = leaf(6, 3, 5), leaf(3, seed=1), leaf(3, seed=2)
        mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        y, new_mean, new_var = batch_norm(x, weight, bias, mean, var, 0.1, 1e-5)
        module = torch.nn.BatchNorm1d(3).double()
        module.weight.data, module.bias.data = weight.detach(), bias.detach()
        assert torch.equal(y, module(x)) and torch.equal(new_mean, module.running_mean) and torch.equal(new_var, module.running_var)
        assert mean.eq(0).all() and var.eq(1).all()

    def test_a_cumulative_average_is_refused(self):
        with pytest.raises(ValueError, match="momentum"):
            batch_norm(leaf(4, 2), None, None, torch.zeros(2), torch.ones(2), None, 1e-5)

    @pytest.mark.parametrize("affine", [True, False])
    @pytest.mark.parametrize("shares", [(3, 3), (5, 1), (4, 1, 1), (6, 0)])
    @pytest.mark.parametrize("shift, count", [(0.0, None), (1e6, None), (0.0, 24)])
    def test_uneven_shares_give_the_full_batchs_result(self, affine, shares, shift, count):
        x = leaf(6, 3, 4, shift=shift)
        weight, bias = (leaf(3, seed=1), leaf(3, seed=2)) if affine else (None, None)
        mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        dense = batch_norm(x, weight, bias, mean, var, 0.1, 1e-5)
        dy = leaf(6, 3, 4, seed=9).detach()
        wanted = torch.autograd.grad(dense[0], [t for t in (x, weight, bias) if t is not None], dy)
        starts = [sum(shares[:i]) for i in range(len(shares))]

        def part(axis):
            rows = slice(starts[axis.index], starts[axis.index] + shares[axis.index])
            local = [copy(t) for t in (x[rows], weight, bias) if t is not None]
            y, new_mean, new_var = sync_batch_norm(*(local if affine else [*local, None, None]), mean, var, 0.1, 1e-5, axis=axis, count=count)
            return y.detach(), new_mean, new_var, torch.autograd.grad(y, local, dy[rows])

        ranks = run_lockstep(part, len(shares))
        tolerance = 1e-12 if shift == 0.0 else 1e-8
        assert close(torch.cat([r[0] for r in ranks]), dense[0].detach(), tolerance)
        for r in ranks:
            assert close(r[1], dense[1]) and close(r[2], dense[2], tolerance)
        assert close(torch.cat([r[3][0] for r in ranks]), wanted[0], tolerance)
        for i in range(1, len(wanted)):
            assert close(torch.stack([r[3][i] for r in ranks]).sum(0), wanted[i], tolerance)

    def test_statistics_over_two_axes_at_once(self):
        x = leaf(4, 2, 6)
        dense, _, _ = batch_norm(x, None, None, None, None, None, 1e-5)

        def part(a, b):
            local = x.detach()[2 * a.index : 2 * a.index + 2, :, 3 * b.index : 3 * b.index + 3]
            return sync_batch_norm(local, None, None, None, None, None, 1e-5, axis=(a, b))[0]

        found = run_lockstep(part, 2, 2)
        assert close(torch.cat([torch.cat(found[:2], 2), torch.cat(found[2:], 2)]), dense.detach())


class TestVocabulary:
    @pytest.mark.parametrize("padding_idx", [-1, 0, 5, 6])
    @pytest.mark.parametrize("degree", [2, 4])
    def test_shares_of_an_embedding_add_up_to_it(self, padding_idx, degree):
        weight = leaf(12, 3)
        ids = torch.tensor([[0, 5, 6, 11], [6, 6, 0, 5]])
        wanted = torch.ops.aten.embedding.default(weight, ids, padding_idx)
        dy = leaf(2, 4, 3, seed=1).detach()
        (wanted_grad,) = torch.autograd.grad(wanted, weight, dy)

        def part(axis):
            local = copy(weight.chunk(degree)[axis.index])
            y = vocab_embedding(local, ids, padding_idx, axis=axis)
            return y.detach(), torch.autograd.grad(y, local, dy)[0]

        ranks = run_lockstep(part, degree)
        assert close(sum(r[0] for r in ranks), wanted.detach())
        assert close(torch.cat([r[1] for r in ranks]), wanted_grad)

    @pytest.mark.parametrize("bad", [-1, 12])
    def test_an_id_outside_of_the_vocabulary_fails_as_in_the_dense_operator(self, bad):
        with pytest.raises(RuntimeError, match="outside of the 12"):
            run_lockstep(lambda axis: vocab_embedding(torch.zeros(6, 2), torch.tensor([0, bad]), axis=axis), 2)

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("reduction", [0, 2])
    @pytest.mark.parametrize("shape", [(5, 8), (2, 8, 3), (8,)])
    def test_cross_entropy_is_the_dense_one_on_every_rank(self, shape, reduction, smoothing):
        logits = (leaf(*shape).detach() * 5).requires_grad_()
        dim = 1 if len(shape) > 1 else 0
        rows = shape[:dim] + shape[dim + 1 :]
        labels = torch.randint(0, 8, rows, generator=torch.Generator().manual_seed(3))
        if rows:
            labels.view(-1)[1] = -100
        wanted = torch.ops.aten.cross_entropy_loss.default(logits, labels, None, reduction, -100, smoothing)
        dy = torch.randn_like(wanted)
        (wanted_grad,) = torch.autograd.grad(wanted, logits, dy)

        def part(axis):
            local = copy(logits.chunk(4, dim)[axis.index])
            loss = vocab_cross_entropy(local, labels, None, reduction, -100, smoothing, axis=axis)
            return loss.detach(), torch.autograd.grad(loss, local, dy)[0]

        ranks = run_lockstep(part, 4)
        assert all(close(r[0], wanted.detach()) for r in ranks)
        assert close(torch.cat([r[1] for r in ranks], dim), wanted_grad)

    def test_padded_classes_count_for_nothing(self):
        logits = leaf(4, 7)
        labels = torch.tensor([0, 6, 3, 2])
        wanted = F.cross_entropy(logits, labels, reduction="sum")
        (wanted_grad,) = torch.autograd.grad(wanted, logits)
        padded = torch.cat([logits.detach(), torch.full((4, 1), float("-inf"), dtype=torch.float64)], 1)

        def part(axis):
            local = copy(padded.chunk(2, 1)[axis.index])
            loss = vocab_cross_entropy(local, labels, reduction=2, axis=axis)
            return loss.detach(), torch.autograd.grad(loss, local)[0]

        ranks = run_lockstep(part, 2)
        grad = torch.cat([r[1] for r in ranks], 1)
        assert close(ranks[0][0], wanted.detach()) and close(grad[:, :7], wanted_grad) and grad[:, 7].eq(0).all()

    def test_what_cannot_be_exact_is_refused(self):
        def asks(**kwargs):
            return lambda axis: vocab_cross_entropy(torch.zeros(2, 2), kwargs.pop("labels", torch.zeros(2, dtype=torch.int64)), axis=axis, **kwargs)

        for kwargs, text in (
            ({"reduction": 1}, "count"),
            ({"reduction": 2, "weight": torch.ones(4)}, "weights"),
            ({"reduction": 2, "labels": torch.zeros(2, 2)}, "probabilities"),
        ):
            with pytest.raises(ValueError, match=text):
                run_lockstep(asks(**kwargs), 2)

    def test_bfloat16_is_as_good_as_torchs(self):
        logits, labels = leaf(64, 32), torch.arange(64) % 32
        half = logits.detach().bfloat16()
        wanted = F.cross_entropy(half.double(), labels, reduction="none")
        ranks = run_lockstep(lambda axis: vocab_cross_entropy(half.chunk(2, 1)[axis.index], labels, reduction=0, axis=axis), 2)
        assert ranks[0].dtype == torch.bfloat16 and close(ranks[0].double(), wanted, 4e-3)


class TestDropout:
    def test_without_a_state_it_is_torchs(self):
        x = leaf(5, 7)
        torch.manual_seed(0)
        found = dropout(x, 0.3, "op")
        torch.manual_seed(0)
        assert torch.equal(found, F.dropout(x, 0.3))

    def test_ranks_that_hold_the_same_get_the_same_mask_and_shards_distinct_ones(self):
        def part(axis):
            x = torch.ones(8, 8)
            with use_state(STATE):
                return dropout(x, 0.5, "op"), dropout(x, 0.5, "op", axes=(axis,))

        (same_0, own_0), (same_1, own_1) = run_lockstep(part, 2)
        assert torch.equal(same_0, same_1) and not torch.equal(own_0, own_1)

    def test_its_gradient_uses_the_same_mask(self):
        x = leaf(16, 16)
        with use_state(STATE):
            y = dropout(x, 0.25, "op")
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(grad * x, y) or close(grad * x.detach(), y.detach())

    @pytest.mark.parametrize("p", [0.0, 1.0])
    def test_the_ends_of_the_range(self, p):
        x = leaf(3, 3)
        with use_state(STATE):
            y = dropout(x, p, "op")
        assert torch.equal(y, x * (1 - p))

    def test_exact_masks_are_equal_under_every_division(self):
        x = torch.ones(6, 8, dtype=torch.float64)
        with use_state(EXACT):
            whole = dropout(x, 0.5, "op", rows=(0, 1, 1))

        def part(axis):
            found = []
            for start in (0, 3):  # two micro-batches
                with use_state(RandomState(1, 2, start // 3, row_start=start, exact=True)):
                    found.append(dropout(x[:3, :4], 0.5, "op", axes=(axis,), windows=((1, 2, 2, 2),), rows=(0, 1, 1)))
            return torch.cat(found)

        parts = [r.view(6, 2, 1, 2) for r in run_lockstep(part, 2)]
        assert torch.equal(torch.cat(parts, 2).reshape(6, 8), whole)

    def test_rows_that_share_their_dimension_with_a_divided_sequence(self):
        x = torch.ones(4 * 6, 5, dtype=torch.float64)  # dimension 0 is (batch 4, sequence 6)
        with use_state(EXACT):
            whole = dropout(x, 0.5, "op", rows=(0, 1, 6))

        def part(axis):
            with use_state(RandomState(1, 2, 1, row_start=2, exact=True)):
                return dropout(x[: 2 * 3], 0.5, "op", axes=(axis,), windows=((0, 2, 6, 1),), rows=(0, 1, 6))

        parts = [r.view(2, 3, 5) for r in run_lockstep(part, 2)]
        assert torch.equal(torch.cat(parts, 1).reshape(12, 5), whole[12:])


class TestAttention:
    @pytest.mark.parametrize(
        "causal, masked, gqa", [(False, None, False), (True, None, False), (False, "float", False), (False, "bool", True), (True, None, True)]
    )
    def test_with_a_mask_that_keeps_all_it_is_torchs(self, causal, masked, gqa):
        q, k, v = leaf(2, 4, 5, 8), leaf(2, 2 if gqa else 4, 5, 8, seed=1), leaf(2, 2 if gqa else 4, 5, 8, seed=2)
        mask = leaf(5, 5, seed=3).detach() if masked else None
        if masked == "bool":
            mask = mask > 0
            mask[2] = False  # a query that may look at nothing
        tiny = 1e-14  # so small that nothing is dropped, yet on the keyed path
        with use_state(STATE):
            found = attention(q, k, v, mask, tiny, causal, None, gqa, "op")
        wanted = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=gqa)
        assert close(found.detach(), wanted.detach())
        dy = torch.randn_like(wanted)
        for a, b in zip(torch.autograd.grad(found, (q, k, v), dy), torch.autograd.grad(wanted, (q, k, v), dy), strict=True):
            assert close(a, b)

    def test_bfloat16_is_computed_in_fp32(self):
        q, k, v = (leaf(2, 4, 16, 8, seed=s).detach().bfloat16() for s in range(3))
        with use_state(STATE):
            found = attention(q, k, v, None, 0.5, True, None, False, "op")
            wanted = attention(q.double(), k.double(), v.double(), None, 0.5, True, None, False, "op")
        assert found.dtype == torch.bfloat16 and close(found.double(), wanted, 4e-3)

    def test_exact_masks_are_equal_when_heads_are_divided(self):
        q, k, v = (leaf(2, 4, 5, 8, seed=s).detach() for s in range(3))
        with use_state(EXACT):
            whole = attention(q, k, v, None, 0.4, True, None, False, "op", rows=(0, 1, 1))

        def part(axis):
            local = (t.chunk(2, 1)[axis.index] for t in (q, k, v))
            with use_state(EXACT):
                return attention(*local, None, 0.4, True, None, False, "op", axes=(axis,), windows=((1, 1, 4, 1),), rows=(0, 1, 1))

        assert close(torch.cat(run_lockstep(part, 2), 1), whole)
