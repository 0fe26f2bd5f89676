"""Activations of a transformer layer: the formulas and figures of Korthikanti et al. 2022."""

import pytest

from tests.towers.user_errors import refused
from towers.memory.transformer_activations import (
    LayerActivations,
    Recomputation,
    TransformerLayer,
    layer_activations,
)

# Table 3 of the paper; the sequence length is 2048 and each layer has 8 slices.
MODELS = {
    "22B": TransformerLayer(2048, 4, 6144, 64),
    "GPT-3": TransformerLayer(2048, 1, 12288, 96),
    "MT-NLG": TransformerLayer(2048, 1, 20480, 128),
    "1T": TransformerLayer(2048, 1, 25600, 160),
}


@pytest.mark.parametrize("layer", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("t", [1, 8])
def test_the_published_formulas(layer, t):
    """Table 2 of the paper."""
    s, b, h, a = layer.sequence_length, layer.microbatch_size, layer.hidden_size, layer.num_heads
    none, selective, full = Recomputation
    published = {
        (False, none): s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
        (True, none): s * b * h * (34 / t + 5 * a * s / (h * t)),
        (False, selective): s * b * h * (10 + 24 / t),
        (True, selective): s * b * h * 34 / t,
        (False, full): 2 * s * b * h,
    }
    for (sliced, recomputation), bytes_published in published.items():
        kept = layer_activations(layer, num_slices=t, sequence_is_sliced=sliced, recomputation=recomputation)
        assert kept.total_bytes == pytest.approx(bytes_published)


def test_the_parts_of_a_layer():
    """Section 4.1: 11sbh + 5as^2b for attention, 19sbh for the MLP, 4sbh for the layer norms."""
    layer = TransformerLayer(sequence_length=3, microbatch_size=5, hidden_size=7, num_heads=2)
    sbh = 3 * 5 * 7
    assert layer_activations(layer) == LayerActivations(11 * sbh + 5 * 2 * 3**2 * 5, 19 * sbh, 4 * sbh)
    everything_again = layer_activations(layer, recomputation=Recomputation.FULL)
    assert everything_again == LayerActivations(0, 0, 2 * sbh)


@pytest.mark.parametrize("name, saved", [("GPT-3", 0.70), ("MT-NLG", 0.65)])
def test_what_selective_recomputation_saves(name, saved):
    """Section 5."""
    whole = layer_activations(MODELS[name]).total_bytes
    selective = layer_activations(MODELS[name], recomputation=Recomputation.SELECTIVE).total_bytes
    assert 1 - selective / whole == pytest.approx(saved, abs=0.005)


@pytest.mark.parametrize("layer", MODELS.values(), ids=MODELS)
def test_both_techniques_need_about_a_fifth(layer):
    """Section 6.1: of what slices alone need; full recomputation needs about a tenth."""
    slices = layer_activations(layer, num_slices=8).total_bytes
    both = layer_activations(layer, num_slices=8, sequence_is_sliced=True, recomputation=Recomputation.SELECTIVE)
    full = layer_activations(layer, num_slices=8, recomputation=Recomputation.FULL)
    assert 0.16 < both.total_bytes / slices < 0.205
    assert 0.07 < full.total_bytes / slices < 0.1


def test_what_is_refused():
    with refused("slices=0", "at least one slice"):
        layer_activations(MODELS["22B"], num_slices=0)
