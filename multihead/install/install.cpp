// SPDX-License-Identifier: MIT
#include "multihead/install.h"

#include <pthread.h>

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
    // Not destroyed: PyTorch's dispatcher may be gone before. A child that is
    // forked while another thread installs must find it unlocked.
    static auto* installation = [] {
      pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                     [] { get().mutex_.unlock(); });
      return new Installation;
    }();
    return *installation;
  }

  void install(InstallOptions options) {
    const std::lock_guard lock(mutex_);
    attention_.wanted = true;
    linear_.wanted |= options.linear;
    varlen_.wanted |= options.varlen;
    update();
  }

  void uninstall() {
    const std::lock_guard lock(mutex_);
    attention_.wanted = linear_.wanted = varlen_.wanted = false;
    update();
  }

  void add_scopes(int count, InstallOptions options) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(attention_.scopes + count >= 0 &&
                    (!options.linear || linear_.scopes + count >= 0) &&
                    (!options.varlen || varlen_.scopes + count >= 0),
                "leave_installed: options must be those of an enter_installed "
                "before it, got linear=",
                options.linear ? "true" : "false",
                options.varlen ? ", varlen=true" : "");
    attention_.scopes += count;
    if (options.linear) linear_.scopes += count;
    if (options.varlen) varlen_.scopes += count;
    update();
  }

  void add_varlen_scopes(int count) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(varlen_.scopes + count >= 0,
                "leave_varlen: calls must follow as many of enter_varlen, got "
                "one more");
    varlen_.scopes += count;
    update();
  }

  void add_redirections(int count) {
    const std::lock_guard lock(mutex_);
    redirections_ += count;
    update();
  }

  bool is_active() {
    const std::lock_guard lock(mutex_);
    return attention_.is_active();
  }

 private:
  struct Part {
    bool wanted = false;
    int scopes = 0;
    overrides::Registrations registrations = {};

    bool is_active() const { return wanted || scopes > 0; }
    // Is it to be registered now? Is it to be taken back, it is.
    bool begins(bool for_others = false) {
      const bool active = is_active() || for_others;
      if (!active) registrations.clear();
      return active && registrations.empty();
    }
  };

  void update() {
    NoWarnings handler;
    const c10::WarningUtils::WarningHandlerGuard silent(&handler);
    overrides::is_wanted = attention_.is_active();
    if (attention_.begins(redirections_ > 0)) {
      overrides::scaled_dot_product_attention(attention_.registrations);
      overrides::native_multi_head_attention(attention_.registrations);
    }
    if (linear_.begins() && why_not_linear().empty()) {
      overrides::matrix_products(linear_.registrations);
    }
    if (varlen_.begins()) {
      overrides::variable_length_attention(varlen_.registrations);
    }
  }

  std::mutex mutex_;
  Part attention_, linear_, varlen_;
  int redirections_ = 0;
};

}  // namespace

void install(InstallOptions options) { Installation::get().install(options); }
void uninstall() { Installation::get().uninstall(); }
bool is_installed() { return Installation::get().is_active(); }
void enter_installed(InstallOptions options) {
  Installation::get().add_scopes(1, options);
}
void leave_installed(InstallOptions options) {
  Installation::get().add_scopes(-1, options);
}
void enter_varlen() { Installation::get().add_varlen_scopes(1); }
void leave_varlen() { Installation::get().add_varlen_scopes(-1); }
void overrides::enter_redirection() { Installation::get().add_redirections(1); }
void overrides::leave_redirection() {
  Installation::get().add_redirections(-1);
}

}  // namespace multihead
