// SPDX-License-Identifier: MIT
//
// All faults with their codes, as JSON: what the pages of the documentation and
// other tools are written from.
#include <nlohmann/json.hpp>

#include "diagnosis/report/codes.h"
#include "diagnosis/stages/recipe.h"
#include "multihead/diagnosis.h"

namespace multihead::diagnosis {

std::string fault_catalogue() {
  using Json = nlohmann::ordered_json;
  Json all = Json::array();
  for (const FaultCode& code : all_codes()) {
    Json places = Json::array();
    for (const Fault& fault : all_faults()) {
      if (fault.name != code.name) continue;
      Json details = Json::array();
      for (const Way& way : fault.ways)
        if (!way.detail.empty()) details.push_back(way.detail);
      places.push_back({{"stage", name_of(*fault.stage)},
                        {"sentence", fault.sentence},
                        {"remedy", fault.remedy},
                        {"details", details}});
    }
    if (places.empty())
      places.push_back({{"stage", ""},
                        {"sentence", code.sentence},
                        {"remedy", code.remedy},
                        {"details", Json::array()}});
    all.push_back({{"code", code.code},
                   {"name", code.name},
                   {"hurts", code.hurts},
                   {"places", places}});
  }
  return all.dump();
}

}  // namespace multihead::diagnosis
