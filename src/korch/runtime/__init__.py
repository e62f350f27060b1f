"""Plan -> executable and artifact."""
