"""avg@k of mathematical answers as a metric of the `evaluate` library.

completions of every problem, gold answers -> {"avg@k", "avg@k_stderr", "k"}

Loaded by `evaluate.load("eval/metrics/avg_at_k")`. Knows nothing of models or prompts; the judge and the formulas are
perl's own, so the numbers are those of `perl eval`.
"""

from collections.abc import Sequence

import datasets

# By its name: `evaluate.load` takes the first metric class that it finds in this file.
import evaluate

from perl.evaluation.metrics import average_at_k, standard_error
from perl.evaluation.score import check_texts, judge_rows

_DESCRIPTION = """\
avg@k: the share of completions that are right, averaged over problems, with a standard error clustered by problem \
(completions of one problem are not independent). An answer is right if perl's verifier finds it equal to the gold \
answer; a completion without an answer, or one that cannot be compared, is not right."""

_INPUTS = r"""
Args:
    predictions: One list a problem: the k completions of the problem, all that the model wrote.
    references: One gold answer a problem: bare, after "####", or in a worked solution's last \boxed{}.
    k: Completions a problem. Default: as many as there are; every problem must have the same number.
Returns:
    avg@k: 0..1.
    avg@k_stderr: Its standard error; NaN for fewer than two problems.
    k: Completions a problem.
Examples:
    >>> metric = evaluate.load("eval/metrics/avg_at_k")
    >>> metric.compute(predictions=[["\\boxed{4}", "\\boxed{5}"], ["\\boxed{7}", "\\boxed{7}"]], references=["4", "7"])
    {'avg@k': 0.75, 'avg@k_stderr': 0.25, 'k': 2}
"""

_CITATION = """\
@article{miller2024adding,
  title={Adding Error Bars to Evals: A Statistical Approach to Language Model Evaluations},
  author={Miller, Evan},
  journal={arXiv preprint arXiv:2411.00640},
  year={2024}
}"""


class AvgAtK(evaluate.Metric):
    """The share of completions that are right, averaged over problems."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": datasets.Sequence(datasets.Value("string")),
                    "references": datasets.Value("string"),
                }
            ),
            reference_urls=["https://arxiv.org/abs/2411.00640"],
        )

    def add_batch(
        self,
        *,
        predictions: Sequence[object] | None = None,
        references: Sequence[object] | None = None,
        **further: object,
    ) -> None:
        """As of every metric, and of `compute`; what is no text is refused, of which the library would make one."""
        check_texts(predictions or (), references or ())
        super().add_batch(predictions=predictions, references=references, **further)

    def add(self, *, prediction: object = None, reference: object = None, **further: object) -> None:
        """As of every metric."""
        check_texts([prediction], [reference])
        super().add(prediction=prediction, reference=reference, **further)

    def _compute(
        self, predictions: Sequence[Sequence[str]], references: Sequence[str], k: int | None = None
    ) -> dict[str, float | int]:
        k = max(map(len, predictions), default=1) if k is None else k
        for row in predictions:
            if len(row) != k:
                raise ValueError(f"avg@{k} needs {k} completions of every problem, there are {len(row)} of one")
        right = [[verdict.right for verdict in row] for row in judge_rows(predictions, references)]
        return {"avg@k": average_at_k(right), "avg@k_stderr": standard_error(right), "k": k}
