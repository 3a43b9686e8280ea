"""The forms that the models' code has for an NVIDIA card, computed by the CPU."""

from jax import lax


def use_card_forms(monkeypatch):
    """Has what depends on the platform take its form for a card; to be called before anything is traced."""

    def on_a_card(*operands, default=None, **forms):
        return forms.get("cuda", default)(*operands)

    monkeypatch.setattr(lax, "platform_dependent", on_a_card)
