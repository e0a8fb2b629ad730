// The scale of one group after a step: ScaleUpdate of ops.h. Products are those of torch's own scaler: in double, then
// rounded to float.
#pragma once

#include "common/numeric.h"
#include "ops.h"

namespace fastemb {

FE_FUNCTION bool is_finite(float x) { return x - x == 0.0f; }

FE_FUNCTION void update_scale(float& scale, ScaleState& state, float found_inf, const ScaleConfig& config) {
  if (found_inf != 0.0f) {
    state.skips += 1;
    state.growth = 0;
    if (state.skips < config.hysteresis) return;
    const double smaller = static_cast<double>(scale) * config.backoff_factor;
    scale = static_cast<float>(smaller > config.min_scale ? smaller : config.min_scale);
    return;
  }
  state.skips = 0;
  state.growth += 1;
  if (state.growth < config.growth_interval) return;
  state.growth = 0;
  const float larger = static_cast<float>(static_cast<double>(scale) * config.growth_factor);
  const float most = static_cast<float>(config.max_scale);
  const float capped = larger < most ? larger : most;
  if (is_finite(larger) && capped > scale) scale = capped;
}

}  // namespace fastemb
