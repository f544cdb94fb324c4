// Where the clusters are: test_others.py starts them and says so.

export const { THALWEG_URL: baseURL, THALWEG_MODEL: model, THALWEG_CALLING_URL: callingURL } = process.env;
export const { THALWEG_BROKEN_URL: brokenURL } = process.env;
export const apiKey = "unused";
export const messages = [{ role: "user", content: "What is the weather in Oslo, and what is 2 + 3?" }];

// One answer only, so that no test hangs on the model's wit.
export const river = {
  type: "object",
  properties: { name: { const: "Rhine" }, length_km: { const: 1233 } },
  required: ["name", "length_km"],
  additionalProperties: false,
};
export const rhine = { name: "Rhine", length_km: 1233 };
export const calls = [
  ["get_weather", { city: "Oslo", unit: "celsius" }],
  ["add", { a: 2, b: 3 }],
];
