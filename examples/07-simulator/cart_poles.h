// Carts on rails, each with a pole that must not fall. The equations are those of Barto, Sutton and Anderson,
// "Neuronlike adaptive elements that can solve difficult learning control problems", 1983.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>
#include <span>
#include <vector>

class CartPoles {
 public:
  static constexpr int parts = 4;      // of a state: position (m), speed (m/s), angle (rad), angular speed (rad/s)
  static constexpr int longest = 500;  // steps of an episode
  using State = std::array<float, parts>;

  CartPoles(std::size_t count, std::uint64_t seed) : dice_(seed), states_(count), ages_(count) {
    for (auto& state : states_) state = fresh();
  }

  [[nodiscard]] std::size_t size() const { return states_.size(); }
  [[nodiscard]] const State& state(std::size_t pole) const { return states_[pole]; }

  /// Pushes one cart for a fiftieth of a second. True: its episode has ended, and another has begun.
  bool step(std::size_t pole, bool right) {
    auto& [position, speed, angle, turning] = states_[pole];
    const float sine = std::sin(angle), cosine = std::cos(angle);
    const float push = ((right ? force : -force) + pole_mass * half_length * turning * turning * sine) / mass;
    const float turn =
        (gravity * sine - cosine * push) / (half_length * (4.0F / 3 - pole_mass * cosine * cosine / mass));
    const float pull = push - pole_mass * half_length * turn * cosine / mass;
    position += tick * speed;
    speed += tick * pull;
    angle += tick * turning;
    turning += tick * turn;
    const bool fallen = std::abs(position) > 2.4F || std::abs(angle) > 12 * std::numbers::pi_v<float> / 180;
    if (++ages_[pole] < longest && !fallen) return false;
    states_[pole] = fresh();
    ages_[pole] = 0;
    return true;
  }

 private:
  static constexpr float gravity = 9.8F, pole_mass = 0.1F, mass = 1.1F, half_length = 0.5F, force = 10.0F, tick = 0.02F;

  State fresh() {
    std::uniform_real_distribution<float> small(-0.05F, 0.05F);
    State state;
    for (auto& part : state) part = small(dice_);
    return state;
  }

  std::mt19937_64 dice_;
  std::vector<State> states_;
  std::vector<int> ages_;
};
