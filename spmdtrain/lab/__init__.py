"""What reads runs from outside, or takes them up again to compare them.

Only the page is drawn by a run itself: it lies on a lower floor.
"""
