"""Membership in a row: tokens left out, documents joined, boundaries that follow."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sdpa_toys import Decoder

from hf_neat_packing.contract import PackingCapabilities
from hf_neat_packing.documents import lengths_to_document_map
from hf_neat_packing.errors import BoundaryError, ContractError
from hf_neat_packing.hooks.sdpa import pack_sdpa_only_model
from hf_neat_packing.positions import position_ids_from_document_map
from hf_neat_packing.subdocuments import (
    adapt_model_inputs,
    enable_xdoc_attention,
    group_map,
    join_documents,
    require_supported_packing_contract,
    select_membership,
    selected_boundaries,
)

BLOCK_CAUSAL = PackingCapabilities("block_causal")
VARLEN = PackingCapabilities("flash_varlen")
RECURRENT = PackingCapabilities("block_causal", requires_packed_sequence_metadata=True)


def make_batch(document_ids, position_ids=None):
    ids = torch.tensor(document_ids)
    positions = (
        position_ids_from_document_map(ids) if position_ids is None else torch.tensor(position_ids)
    )
    return {
        "input_ids": torch.arange(ids.numel()).reshape(ids.shape),
        "labels": torch.arange(ids.numel()).reshape(ids.shape),
        "padding_mask": ids == 0,
        "position_ids": positions,
        "document_ids": ids,
    }


def joined_by_hand(document_map, positions, groups=None, start=0):
    """The rule, token by token, in the words of the specification."""
    ids, moved = torch.zeros_like(document_map), positions.clone()
    axes = positions[None] if positions.ndim == 2 else positions
    out = moved[None] if positions.ndim == 2 else moved
    for row in range(document_map.shape[0]):
        order = []
        for token in range(document_map.shape[1]):
            document = int(document_map[row, token])
            if document and document not in order:
                order.append(document)
        numbers, offset, last = {}, 0, None
        for document in order:
            where = document_map[row] == document
            group = 1 if groups is None else int(groups[row][where][0])
            offset = offset if group == last else 0
            last = group
            ids[row, where] = numbers.setdefault(group, len(numbers) + 1)
            out[:, row, where] += offset
            offset += int(axes[:, row, where].max()) + 1 - start
    return ids, moved


lengths = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=3)


class TestSelect:
    def test_tokens_that_a_processor_put_in_are_left_out(self):
        batch = make_batch([[1, 1, 1, 2, 2, 0]])
        before = {name: value.clone() for name, value in batch.items()}
        eligible = torch.tensor([[True, False, True, True, True, True]])
        result = adapt_model_inputs(batch, eligible)
        assert result is batch
        assert batch["attention_document_ids"].tolist() == [[1, 0, 1, 2, 2, 0]]
        assert all(torch.equal(batch[name], before[name]) for name in before)

    def test_without_eligibility_the_map_is_a_copy(self):
        batch = adapt_model_inputs(make_batch([[1, 1, 2, 0]]))
        batch["attention_document_ids"][0, 0] = 9
        assert batch["document_ids"].tolist() == [[1, 1, 2, 0]]

    @pytest.mark.parametrize("eligible", [torch.ones(1, 3).bool(), torch.ones(1, 4).long()])
    def test_an_eligibility_that_does_not_fit_is_refused(self, eligible):
        with pytest.raises(BoundaryError, match="Eligibility must be bool"):
            select_membership(torch.tensor([[1, 1, 2, 0]]), eligible)

    def test_a_batch_without_document_ids_is_refused(self):
        with pytest.raises(ContractError, match="document_ids"):
            adapt_model_inputs({"input_ids": torch.zeros(1, 2)})
        with pytest.raises(BoundaryError, match="comes back"):
            adapt_model_inputs(make_batch([[1, 2, 1]], [[0, 0, 0]]))


class TestJoin:
    @pytest.mark.parametrize(
        ("ids", "positions", "expected"),
        [
            ([[1, 1, 1, 2, 2, 0]], [[0, 1, 2, 0, 1, 0]], [[0, 1, 2, 3, 4, 0]]),
            ([[1, 2, 2, 3, 3, 3]], [[0, 0, 1, 0, 1, 2]], [[0, 1, 2, 3, 4, 5]]),
            ([[1, 1, 1]], [[0, 1, 2]], [[0, 1, 2]]),
        ],
    )
    def test_positions_run_through_the_row(self, ids, positions, expected):
        batch = adapt_model_inputs(make_batch(ids, positions))
        before = {name: (value, value.clone()) for name, value in batch.items()}
        assert enable_xdoc_attention(batch, BLOCK_CAUSAL) is batch
        assert batch["position_ids"].tolist() == expected
        assert batch["attention_document_ids"].tolist() == [[min(i, 1) for i in ids[0]]]
        assert batch["document_ids"].tolist() == ids
        assert all(torch.equal(tensor, copy) for tensor, copy in before.values()), (
            "no tensor is written into"
        )

    def test_axes_move_together_by_the_largest_of_them(self):
        ids = torch.tensor([[1, 1, 1, 1, 2, 2]])
        axes = torch.tensor([[[0, 1, 1, 2, 0, 1]], [[0, 1, 2, 3, 0, 1]], [[0, 1, 1, 2, 0, 1]]])
        _, moved = join_documents(ids, axes)
        assert moved[:, 0].tolist() == [[0, 1, 1, 2, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 1, 2, 4, 5]]
        # Four axes: the first counts tokens, and an image takes up more tokens than positions.
        text = torch.tensor([[[0, 1, 2, 3, 0, 1]]])
        image = torch.tensor([[[0, 1, 1, 1, 0, 1]]]).expand(3, 1, 6)
        _, moved = join_documents(ids, torch.cat([text, image]))
        assert moved[:, 0].tolist() == [[0, 1, 2, 3, 4, 5]] + [[0, 1, 1, 1, 2, 3]] * 3

    @given(
        rows=lengths,
        axes=st.sampled_from([0, 1, 3]),
        start=st.integers(0, 2),
        pad=st.integers(0, 3),
        data=st.data(),
    )
    @settings(deadline=None, derandomize=True, max_examples=60)
    def test_any_rows_groups_and_axes_follow_the_rule(self, rows, axes, start, pad, data):
        width = max(sum(row) for row in rows) + pad
        ids = lengths_to_document_map(rows, row_length=width)
        positions = position_ids_from_document_map(ids, start=start)
        if axes:
            positions = torch.stack(
                [(positions - start) // (axis + 1) + start for axis in range(axes)]
            )
        keys = [
            sorted(
                data.draw(st.lists(st.sampled_from("abc"), min_size=len(row), max_size=len(row)))
            )
            for row in rows
        ]
        for groups in (None, group_map(ids, keys)):
            joined, moved = join_documents(ids, positions, groups=groups, position_start=start)
            expected, expected_positions = joined_by_hand(ids, positions, groups, start)
            assert torch.equal(joined, expected)
            assert torch.equal(moved, expected_positions)

    def test_documents_of_a_group_are_joined_and_others_are_not(self):
        ids = torch.tensor([[1, 1, 2, 3, 3, 4, 0], [1, 2, 2, 2, 3, 0, 0]])
        groups = group_map(ids, [["a", "a", "b", None], [None, None, "a"]])
        joined, moved = join_documents(ids, position_ids_from_document_map(ids), groups=groups)
        assert joined.tolist() == [[1, 1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 3, 0, 0]]
        assert moved.tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 0, 0, 1]]

    def test_a_group_that_comes_back_is_refused(self):
        ids = torch.tensor([[1, 1, 2, 3, 0]])
        groups = group_map(ids, [["a", "b", "a"]])
        with pytest.raises(BoundaryError, match="Group 1 of row 0 comes back"):
            join_documents(ids, position_ids_from_document_map(ids), groups=groups)

    def test_positions_that_were_moved_before_are_refused(self):
        ids = torch.tensor([[1, 1, 2, 2]])
        joined, moved = join_documents(ids, torch.tensor([[0, 1, 0, 1]]))
        with pytest.raises(BoundaryError, match="not local"):
            join_documents(ids, moved)
        # Joined as the one document that it is now, nothing moves.
        again, still = join_documents(joined, moved)
        assert torch.equal(again, joined)
        assert torch.equal(still, moved)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"position_ids": torch.zeros(1, 3, dtype=torch.long)}, "position_ids"),
            ({"position_ids": torch.zeros(1, 4)}, "position_ids"),
            ({"groups": torch.ones(1, 3, dtype=torch.long)}, "groups"),
            ({"groups": torch.tensor([[1, 2, 2, 2]])}, "two groups"),
            ({"groups": torch.tensor([[1, 1, 0, 0]])}, "in none"),
            ({"membership": torch.ones(2, 4, dtype=torch.long)}, "membership"),
        ],
    )
    def test_inputs_that_do_not_fit_are_refused(self, options, message):
        ids = torch.tensor([[1, 1, 2, 2]])
        options = {"position_ids": torch.tensor([[0, 1, 0, 1]]), **options}
        with pytest.raises(BoundaryError, match=message):
            join_documents(ids, options.pop("position_ids"), **options)

    def test_a_number_of_keys_that_is_not_the_number_of_documents_is_refused(self):
        with pytest.raises(BoundaryError, match=r"\[2\] documents but \[1\]"):
            group_map(torch.tensor([[1, 1, 2, 0]]), [["a"]])

    @pytest.mark.parametrize("groups", [False, True])
    def test_joined_documents_get_what_one_long_document_gets(self, groups):
        torch.manual_seed(0)
        model = Decoder()
        ids = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 0]])
        tokens = torch.randint(1, 50, ids.shape)
        chosen = group_map(ids, [["a", "a", "b"]]) if groups else None
        joined, positions = join_documents(ids, position_ids_from_document_map(ids), groups=chosen)
        with pack_sdpa_only_model(model), torch.no_grad():
            packed = model(tokens, positions, _packed_seq_ids=joined)
            apart = model(tokens, position_ids_from_document_map(ids), _packed_seq_ids=ids)
        for piece in (slice(0, 5), slice(5, 7)) if groups else (slice(0, 7),):
            with torch.no_grad():
                alone = model(tokens[:, piece], torch.arange(piece.stop - piece.start)[None])
            assert torch.allclose(packed[:, piece], alone, atol=1e-12)
        assert (apart - packed)[:, 3:5].abs().max() > 1e-3, "control: the join matters"


class TestBoundariesFollow:
    def test_the_bundle_of_a_recurrent_model_restarts_where_the_selected_membership_does(self):
        batch = adapt_model_inputs(make_batch([[1, 1, 2, 2, 2, 0]]))
        apart = selected_boundaries(batch, RECURRENT)
        assert apart["cu_seqlens"].tolist() == [[0, 2, 5]]
        enable_xdoc_attention(batch, RECURRENT)
        joined = selected_boundaries(batch, RECURRENT)
        assert joined["cu_seqlens"].tolist() == [[0, 5]]
        assert joined["max_seqlen"] == 5
        assert joined["_packed_seq_ids"].tolist() == [[1, 1, 1, 1, 1, 0]]
        assert selected_boundaries(batch, BLOCK_CAUSAL).keys() == {"_packed_seq_ids"}

    def test_boundaries_that_were_built_before_the_join_are_refused(self):
        batch = adapt_model_inputs(make_batch([[1, 1, 2, 2]]))
        batch.update(selected_boundaries(batch, RECURRENT))
        with pytest.raises(ContractError, match="built before"):
            enable_xdoc_attention(batch, RECURRENT)

    def test_a_join_needs_the_selected_membership(self):
        with pytest.raises(ContractError, match="adapt_model_inputs"):
            enable_xdoc_attention(make_batch([[1, 2]]), BLOCK_CAUSAL)
        with pytest.raises(ContractError, match="adapt_model_inputs"):
            selected_boundaries(make_batch([[1, 2]]), BLOCK_CAUSAL)

    def test_offsets_cannot_say_a_joined_document_in_two_pieces(self):
        eligible = torch.tensor([[True, False, True, True]])
        batch = adapt_model_inputs(make_batch([[1, 1, 2, 2]]), eligible)
        before = dict(batch)
        with pytest.raises(ContractError, match="2 pieces"):
            enable_xdoc_attention(batch, VARLEN)
        assert all(batch[name] is before[name] for name in before), "a refused batch is not changed"
        enable_xdoc_attention(batch, BLOCK_CAUSAL)
        assert batch["attention_document_ids"].tolist() == [[1, 0, 1, 1]]
        assert batch["position_ids"].tolist() == [[0, 1, 2, 3]], "a token left out keeps its place"


class TestContract:
    @pytest.mark.parametrize("mask_type", ["block_causal", "document_ids", "flash_varlen"])
    @pytest.mark.parametrize(
        "flag", ["requires_packed_sequence_metadata", "return_packed_sequence_metadata"]
    )
    def test_both_spellings_of_a_contract_are_supported(self, mask_type, flag):
        require_supported_packing_contract(
            SimpleNamespace(packed_mask_type=mask_type, **{flag: True})
        )

    @pytest.mark.parametrize(
        "contract",
        [
            SimpleNamespace(packed_mask_type="dense", requires_packed_sequence_metadata=False),
            SimpleNamespace(requires_packed_sequence_metadata=False),
            SimpleNamespace(packed_mask_type="block_causal"),
            SimpleNamespace(
                packed_mask_type="block_causal", requires_packed_sequence_metadata="yes"
            ),
            SimpleNamespace(
                packed_mask_type="block_causal",
                requires_packed_sequence_metadata=True,
                return_packed_sequence_metadata=False,
            ),
            None,
        ],
        ids=str,
    )
    def test_anything_else_is_refused(self, contract):
        with pytest.raises(ContractError):
            require_supported_packing_contract(contract)
