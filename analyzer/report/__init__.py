"""Reports for people: text, HTML, figures, findings."""
