"""What the notebooks stand on: predict, reveal and check, and the state that each section starts from."""

from workbench.lessons.lesson import Lesson, open_lesson

__all__ = ["Lesson", "open_lesson"]
