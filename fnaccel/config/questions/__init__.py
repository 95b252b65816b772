"""The questions of `fnaccel config`, as pure functions: which comes next, and the recipe of all answers.

Nothing is asked here. `fnaccel.cli.config.ask` shows the questions.
"""

from fnaccel.config.questions.answered import recipe_of as recipe_of
from fnaccel.config.questions.catalogue import next_question as next_question
from fnaccel.config.questions.question import Machine as Machine
from fnaccel.config.questions.question import Question as Question
