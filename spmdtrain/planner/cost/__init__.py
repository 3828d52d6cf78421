"""What a layout costs, in seconds and bytes. Formulas alone: plan.py and estimate.py ask them."""
