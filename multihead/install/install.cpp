// SPDX-License-Identifier: MIT
#include "multihead/install.h"

#include <mutex>
#include <optional>

#include "multihead/install/overrides.h"

namespace multihead {
namespace {

// PyTorch prints a warning, once per process, where a kernel takes the place of
// another. Here somebody asked for it.
class NoWarnings : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

class Installation {
 public:
  static Installation& get() {
    // Not destroyed: PyTorch's dispatcher may be gone before.
    static auto* installation = new Installation;
    return *installation;
  }

  void ask(bool wanted) {
    const std::lock_guard lock(mutex_);
    wanted_ = wanted;
    update();
  }

  void add_scopes(int count) {
    const std::lock_guard lock(mutex_);
    scopes_ += count;
    update();
  }

  bool is_active() {
    const std::lock_guard lock(mutex_);
    return !registrations_.empty();
  }

 private:
  void update() {
    const bool active = wanted_ || scopes_ > 0;
    if (active != registrations_.empty()) return;
    if (!active) return registrations_.clear();
    NoWarnings handler;
    const c10::WarningUtils::WarningHandlerGuard silent(&handler);
    overrides::scaled_dot_product_attention(registrations_);
    overrides::native_multi_head_attention(registrations_);
  }

  std::mutex mutex_;
  bool wanted_ = false;
  int scopes_ = 0;
  overrides::Registrations registrations_;
};

}  // namespace

void install() { Installation::get().ask(true); }
void uninstall() { Installation::get().ask(false); }
bool is_installed() { return Installation::get().is_active(); }
void enter_installed() { Installation::get().add_scopes(1); }
void leave_installed() { Installation::get().add_scopes(-1); }

}  // namespace multihead
