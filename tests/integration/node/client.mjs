// The Node client of OpenAI against a gateway; prints what it understood as one JSON object.
// Usage: node client.mjs BASE_URL KEY
import OpenAI from "openai";

const [, , baseURL, apiKey] = process.argv;
const client = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey, maxRetries: 0 });
const model = "assistant";
const question = { role: "user", content: "Weather?" };
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
};
const told = {};

// Chat, whole: the body, and the headers of the same answer.
const { data: whole, response } = await client.chat.completions
  .create({ model, messages: [question] })
  .withResponse();
told.whole = whole.choices[0].message.content;
told.interactionId = response.headers.get("x-onlinerl-interaction-id");

// Chat, streamed.
const chunks = await client.chat.completions.create({
  model,
  messages: [question],
  stream: true,
  stream_options: { include_usage: true },
});
told.streamed = "";
for await (const chunk of chunks) {
  told.streamed += chunk.choices[0]?.delta?.content ?? "";
  told.usage = chunk.usage ?? null;
}

// Chat, a loop with a tool, streamed.
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const calling = client.chat.completions.stream({ model, messages: [question], tools });
const called = await calling.finalMessage();
told.call = called.tool_calls[0].function;
const after = await client.chat.completions.create({
  model,
  tools,
  messages: [
    question,
    { role: "assistant", content: called.content, tool_calls: called.tool_calls },
    { role: "tool", tool_call_id: called.tool_calls[0].id, content: "sunny" },
  ],
});
told.afterCall = after.choices[0].message.content;

// Responses, streamed, and gone on from.
const events = [];
const stream = client.responses.stream({ model, input: "Hi" });
for await (const event of stream) events.push(event.type);
const final = await stream.finalResponse();
told.events = events;
told.output = final.output.map((item) => item.type);
told.outputText = final.output_text;
const next = await client.responses.create({
  model,
  input: "And?",
  previous_response_id: final.id,
});
told.next = next.output_text;

// Feedback is no part of the client: plain fetch.
const feedback = await fetch(`${baseURL}/v1/feedback`, {
  method: "POST",
  headers: { authorization: `Bearer ${apiKey}`, "content-type": "application/json" },
  body: JSON.stringify({ interaction_id: told.interactionId, metric: "accepted", value: true }),
});
told.feedback = feedback.status;

// An error, as the client sees it.
try {
  await client.responses.create({ model, input: "Hi", background: true });
} catch (error) {
  told.refused = { status: error.status, param: error.param };
}

console.log(JSON.stringify(told));
