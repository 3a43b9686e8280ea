"""The sections about the evaluation of the trained weights: confusions, accuracy of each class, mistakes."""

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loopfeed.engine.evaluation.result import ClassResult
from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.evaluated import Decisions, EvaluatedWeights, Mistake
from loopfeed.engine.report_page.layout import bar, each_run, section
from loopfeed.engine.report_page.markup import Html, folded, join, paragraph, scrolling, table, tag
from loopfeed.engine.report_page.number_text import number, percent
from loopfeed.engine.report_page.subject import Subject
from loopfeed.preprocess.quantities import quantity

_MOST_SHADES = 9
_ALL_CLASSES, _SOME_CLASSES, _MOST_CLASSES = 24, 15, 2000


def evaluated_section(subjects: Sequence[Subject]) -> Html:
    """Return what was evaluated for this page, and the result."""

    def of_run(subject: Subject) -> Html:
        found = _weights(subject)
        record = found.record
        rows = [("weights", found.weights), ("images", found.data)]
        ranks = {"top-1": record.top1, "top-5": record.top5}
        rows += [(name, percent(rank)) for name, rank in ranks.items() if not math.isnan(rank)]
        rows.append(("loss", number(record.loss)))
        rows += [(name, number(value)) for name, value in record.metrics.items() if isinstance(value, int | float)]
        notes = [paragraph(message, class_="note") for message in found.messages]
        return join(table(("what", "value"), rows, caption="Evaluated for this page"), notes)

    return section("weights", "Evaluation of the weights", each_run(subjects, lambda each: each.weights, of_run))


def confusion_section(subjects: Sequence[Subject]) -> Html:
    """Return the confusion matrix of each run or, for many classes, the most frequent confusions."""

    def of_run(subject: Subject) -> Html:
        found, decisions = _weights(subject), _decisions(subject)
        parts = []
        if decisions.matrix is not None:
            parts.append(_matrix(decisions, found))
        if decisions.confusions:
            caption = "The most frequent confusions"
            rows = [
                (class_name(found.classes, each.label), class_name(found.classes, each.predicted), f"{each.count:,}")
                for each in decisions.confusions
            ]
            pairs = table(("class", "taken for", "images"), rows, caption=caption, numbers=(2,))
            parts.append(pairs if decisions.matrix is None else folded(caption, pairs))
        else:
            parts.append(paragraph("No image was taken for another class."))
        if decisions.num_undecided:
            parts.append(
                paragraph(
                    f"{quantity(decisions.num_undecided, 'image')} with NaN logits are in none of these.",
                    class_="warning",
                )
            )
        return join(parts)

    return section("confusion", "Confusion matrix", each_run(subjects, _decided, of_run))


def classes_section(subjects: Sequence[Subject]) -> Html:
    """Return the accuracy of each class."""

    def of_run(subject: Subject) -> Html:
        classes = [each for each in _weights(subject).classes if each.num_images]
        ordered = sorted(classes, key=lambda each: each.top1)
        if len(ordered) <= _ALL_CLASSES:
            return _class_table(ordered, "Top-1 accuracy of each class, lowest first")
        worst = _class_table(ordered[:_SOME_CLASSES], f"The {_SOME_CLASSES} classes with the lowest top-1 accuracy")
        best = _class_table(ordered[: -_SOME_CLASSES - 1 : -1], f"The {_SOME_CLASSES} classes with the highest")
        if len(ordered) * len(subjects) > _MOST_CLASSES:
            rest = paragraph(
                f"The other {len(ordered) - 2 * _SOME_CLASSES:,} classes are left out: run-eval --per-class has them.",
                class_="note",
            )
        else:
            rest = folded(f"All {len(ordered):,} classes", _class_table(ordered, "Top-1 accuracy of each class"))
        return join(worst, folded("The best classes", best), rest)

    return section("classes", "Accuracy of each class", each_run(subjects, _with_class_results, of_run))


def mistakes_section(subjects: Sequence[Subject]) -> Html:
    """Return the mistakes with the highest probability as pictures."""

    def of_run(subject: Subject) -> Html:
        found, decisions = _weights(subject), _decisions(subject)
        if not decisions.mistakes:
            return paragraph("No image was taken for another class.")
        shown = f"The {len(decisions.mistakes)} most confident of {decisions.num_mistakes:,} mistakes."
        pictures = (_mistake(each, found.classes) for each in decisions.mistakes)
        return join(paragraph(shown), tag("ul", pictures, class_="pictures"))

    return section("mistakes", "Most confident mistakes", each_run(subjects, _decided, of_run))


def class_name(classes: Sequence[ClassResult], label: int) -> str:
    """Return the readable name of a class, its number if it has none."""
    return classes[label].name if 0 <= label < len(classes) else str(label)


def _weights(subject: Subject) -> EvaluatedWeights:
    assert isinstance(subject.weights, EvaluatedWeights)
    return subject.weights


def _decisions(subject: Subject) -> Decisions:
    decisions = _weights(subject).decisions
    assert isinstance(decisions, Decisions)
    return decisions


def _decided(subject: Subject) -> Any:
    return subject.weights if isinstance(subject.weights, Absent) else subject.weights.decisions


def _with_class_results(subject: Subject) -> Any:
    if isinstance(subject.weights, Absent) or subject.weights.classes:
        return subject.weights
    return Absent("accuracies of classes exist only for images of one class each, and this run has other labels")


def _matrix(decisions: Decisions, found: EvaluatedWeights) -> Html:
    """Return the matrix as a table; the shade of a cell is its share of the images of its row."""
    matrix = decisions.matrix
    assert matrix is not None
    names = [class_name(found.classes, label) for label in range(len(matrix))]
    totals = np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    shades = np.ceil(_MOST_SHADES * matrix / totals).astype(int)
    head = tag("tr", tag("td"), (tag("th", tag("span", name), scope="col") for name in names))
    rows = (
        tag(
            "tr",
            tag("th", name, scope="row"),
            (
                tag("td", f"{count:,}", class_=f"n s{shade}" + " own" * (row == column))
                for column, (count, shade) in enumerate(zip(counts.tolist(), shade_row.tolist(), strict=True))
            ),
        )
        for row, (name, counts, shade_row) in enumerate(zip(names, matrix, shades, strict=True))
    )
    caption = "Number of images: a row for each class, a column for what its images were taken for"
    content = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", rows), class_="matrix")
    return scrolling(content, caption)


def _class_table(classes: Sequence[ClassResult], caption: str) -> Html:
    rows = [(each.name, bar(100 * each.top1), percent(each.top1), f"{each.num_images:,}") for each in classes]
    return table(("class", "", "top-1", "images"), rows, caption=caption, numbers=(2, 3), class_="bars")


def _mistake(mistake: Mistake, classes: Sequence[ClassResult]) -> Html:
    label, predicted = class_name(classes, mistake.label), class_name(classes, mistake.predicted)
    content = base64.b64encode(mistake.picture).decode()
    picture = tag(
        "img",
        src=f"data:{mistake.media_type};base64,{content}",
        alt=f"Image {mistake.index}: {label}, taken for {predicted}",
        class_="small" if mistake.is_small else None,
    )
    return tag(
        "li",
        picture,
        tag("span", tag("b", label), " taken for ", tag("b", predicted)),
        tag("span", f"probability {percent(mistake.probability)}"),
        tag("span", f"image {mistake.index:,}", class_="note"),
    )
