"""One delivery of a message: what it carries, what is decided for it, what is recorded of it, how it is published again."""
