"""Pages are tested in a real browser."""

from tests.helpers.browser import browser, visit  # noqa: F401
