"""The code paths of the models for an NVIDIA card, computed on the CPU."""

from jax import lax


def use_card_forms(monkeypatch):
    """Make platform-dependent code use its form for a card; call this before anything is traced."""

    def on_a_card(*operands, default=None, **forms):
        return forms.get("cuda", default)(*operands)

    monkeypatch.setattr(lax, "platform_dependent", on_a_card)
