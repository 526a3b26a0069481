"""Model cards of flows and heads: what is known of the encoder, the pairs, the settings, and how good the model is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geoflow_fast.data.fingerprint import Origin
from geoflow_fast.runtime import hub

TAGS = ("uncertainty", "retrieval", "flow-matching", "vision-language")
CALIBRATE = (
    "Probabilities need a calibration. It contains embeddings, so it is uploaded only with its held-out pairs. Without "
    "one, calibrate on held-out pairs of your own: `geoflow rerank --held-out PAIRS`, or "
    "`gf.BayesReranker(...).calibrate(pairs)`."
)
NOT_KNOWN = "not known: the embeddings came without a record of their encoder"


def model_card(
    name: str,
    what: str,
    widths: tuple[int, int],
    origin: Origin,
    network: Mapping[str, Any],
    figures: Mapping[str, Any] | None = None,
    calibration: list[str] | None = None,
) -> str:
    """The card of a model: `what` it is in a sentence, the `widths` of its embeddings, where it comes from, the
    settings of its network, figures on held-out pairs and the lines about what was calibrated. `what` and the lines are
    Markdown."""
    encoders = dict(zip(origin.sides, origin.encoders))
    first, second = map(hub.escaped, origin.sides)
    use = [
        "```python",
        "import geoflow_fast as gf",
        "",
        f'model = gf.{name}.from_pretrained("hf://user/name")  # or the folder that this file is in',
        "```",
    ]
    known = {side: str(encoder) if encoder is not None else NOT_KNOWN for side, encoder in encoders.items()}
    widths_of = {f"width of {side} embeddings": width for side, width in zip(origin.sides, widths)}
    sections = {
        "Use": use,
        "Encoder": [*hub.rows({**known, **widths_of}), "", "Embeddings of another encoder are refused."],
        "Training pairs": hub.rows(origin.pairs) if origin.pairs else ["Not known."],
        "Settings": hub.rows({**network, **origin.settings}),
        "Calibration": [*(calibration or []), CALIBRATE],
        "Held-out figures": hub.rows(figures) if figures else ["None were computed for this model."],
        "Limits": [
            f"- It knows {first} and {second} embeddings like those of its training pairs; elsewhere its probabilities "
            "may be wrong, and the likelihood of a flow tells how unlike new ones are.",
            "- Probabilities hold for galleries and queries like those that it was calibrated on. Calibrate again, on "
            "held-out pairs, for a gallery of another kind or size.",
            "- It says how sure a search is, and not whether what is found is true, fair or safe.",
        ],
    }
    return hub.card_of(name, what, TAGS, sections)
