"""The services, each a process of its own: `python -m examples.order_flow.services
NAME`.
"""
