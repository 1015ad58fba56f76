"""What a module of ``eval/`` shows lighteval, made when lighteval looks for it.

tasks -> TASKS_TABLE

Importing this costs nothing; importing lighteval takes seconds.
"""

from collections.abc import Callable, Sequence

from perl.evaluation.task import Task


def tables_on_demand(tasks: Sequence[Task]) -> Callable[[str], object]:
    """The ``__getattr__`` of a task module: ``TASKS_TABLE``, in which lighteval looks, made when it is asked for.

    A module that has it serves ``lighteval ... --custom-tasks FILE`` and is still imported in a moment elsewhere.
    """

    def attribute(name: str) -> object:
        if name != "TASKS_TABLE":
            raise AttributeError(name)
        from perl.evaluation.lighteval.tasks import tasks_table  # imports lighteval, which takes seconds

        return tasks_table(tasks)

    return attribute
