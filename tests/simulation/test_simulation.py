from tests.simulation.world import World
