"""A compiled step that gives its first loss sooner."""
