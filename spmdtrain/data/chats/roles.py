"""The roles of messages that have a meaning here."""

ANSWERS = "assistant"  # the role whose messages are learned
ASKS = "user"  # the role of a prompt
