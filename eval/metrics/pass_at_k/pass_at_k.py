"""pass@k of mathematical answers as a metric of the `evaluate` library.

completions of every problem, gold answers -> {"pass@k", "pass@k_stderr", "k"}

Loaded by `evaluate.load("eval/metrics/pass_at_k")`. Knows nothing of models or prompts; the judge and the formulas are
perl's own, so the numbers are those of `perl eval`.
"""

from collections.abc import Sequence

import datasets

# By its name: `evaluate.load` takes the first metric class that it finds in this file.
import evaluate

from perl.evaluation.metrics import pass_at_k, pass_at_k_error
from perl.evaluation.score import check_texts, judge_rows

_DESCRIPTION = """\
pass@k: the chance that at least one of k completions is right, averaged over problems. It is estimated without bias \
from the n >= k completions of a problem, 1 - C(n - c, k) / C(n, k) where c are right; its standard error is clustered \
by problem. An answer is right if perl's verifier finds it equal to the gold answer; a completion without an answer, \
or one that cannot be compared, is not right."""

_INPUTS = r"""
Args:
    predictions: One list a problem: at least k completions of the problem, all that the model wrote.
    references: One gold answer a problem: bare, after "####", or in a worked solution's last \boxed{}.
    k: Completions that are drawn. Default: 1.
Returns:
    pass@k: 0..1.
    pass@k_stderr: Its standard error; NaN for fewer than two problems.
    k: Completions that are drawn.
Examples:
    >>> metric = evaluate.load("eval/metrics/pass_at_k")
    >>> predictions = [["\\boxed{4}", "\\boxed{5}"], ["\\boxed{7}", "\\boxed{7}"]]
    >>> metric.compute(predictions=predictions, references=["4", "7"], k=2)
    {'pass@k': 1.0, 'pass@k_stderr': 0.0, 'k': 2}
"""

_CITATION = """\
@article{chen2021evaluating,
  title={Evaluating Large Language Models Trained on Code},
  author={Chen, Mark and Tworek, Jerry and Jun, Heewoo and Yuan, Qiming and others},
  journal={arXiv preprint arXiv:2107.03374},
  year={2021}
}"""


class PassAtK(evaluate.Metric):
    """The chance that at least one of k completions is right, averaged over problems."""

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
            reference_urls=["https://arxiv.org/abs/2107.03374"],
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
        self, predictions: Sequence[Sequence[str]], references: Sequence[str], k: int = 1
    ) -> dict[str, float | int]:
        right = [[verdict.right for verdict in row] for row in judge_rows(predictions, references)]
        return {"pass@k": pass_at_k(right, k), "pass@k_stderr": pass_at_k_error(right, k), "k": k}
