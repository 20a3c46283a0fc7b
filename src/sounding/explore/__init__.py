"""The explorer: a local web page that shows what theory says while you move its settings."""
