"""`headrace doctor`: predicts what a run needs and what would go wrong, before it starts."""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.plan.doctor import Subject, examine, render
else:
    __getattr__ = front_door(__name__)
