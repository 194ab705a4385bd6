"""The Dash app that shows traces in the browser."""
