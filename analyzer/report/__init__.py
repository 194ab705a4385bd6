"""Reports: text, HTML, figures, findings."""
