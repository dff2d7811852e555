"""Parts for other frameworks. Nothing else of this library imports them."""
