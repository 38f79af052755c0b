"""The endpoints: one module each, and the list of their routes.

- `chat`, `chat_batch`, `completions`, `responses`, `messages`, `embeddings`, `scoring`: the endpoints that run the
  model. They share `generation` (from the queue to the stream of answers), `prompting` (tokenizing), `beams` (beam
  search), `deadline` (time limits), `pooled` (embeddings, classes and scores).
- `response_events`, `background`, `stored_responses`: streamed responses, those without a client, and stored ones.
- `files`, `batches`: the Batch API; see `headrace.server.batch`.
- `sagemaker`: the routes that Amazon SageMaker calls. `sleep`: the engine's memory freed and taken again. `adapters`:
  LoRA adapters loaded and unloaded.
- `tokenize`, `models`, `status`, `server_info`, `alerts`, `dashboard`, `admin`, `profile`, `openapi`, `docs`: the
  others.

Request bodies, checks and the shapes of answers are in `headrace.openai`, which batch jobs use too, and in
`headrace.anthropic`.

To add an endpoint: write `async def handler(services, exchange)` in a module here, declare its body as a struct in
`openai/schema/`, and add a `Route` to `ROUTES`. The application, the paths that need no key, the OpenAPI document and
the test of docs/server.md are derived from the list.
"""

from __future__ import annotations

from headrace.anthropic.schema import CountTokensRequest, MessagesRequest
from headrace.openai.schema.adapters import LoadAdapterRequest, SageMakerAdapterRequest, UnloadAdapterRequest
from headrace.openai.schema.batches import BatchRequest
from headrace.openai.schema.chat import ChatBatchRequest, ChatRequest
from headrace.openai.schema.completions import CompletionRequest
from headrace.openai.schema.embeddings import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from headrace.openai.schema.invocations import InvocationRequest
from headrace.openai.schema.profile import StartProfileRequest, StopProfileRequest
from headrace.openai.schema.responses import ResponsesRequest
from headrace.openai.schema.tokenize import DetokenizeRequest, TokenizeRequest
from headrace.server.endpoints import (
    adapters,
    admin,
    alerts,
    batches,
    chat,
    chat_batch,
    completions,
    dashboard,
    docs,
    embeddings,
    files,
    messages,
    models,
    openapi,
    profile,
    responses,
    sagemaker,
    scoring,
    server_info,
    sleep,
    status,
    stored_responses,
    tokenize,
)
from headrace.server.http.exchange import Exchange
from headrace.server.http.routes import Route
from headrace.server.services import Services


async def show_openapi(services: Services, exchange: Exchange) -> None:
    await openapi.show(services, exchange, ROUTES)


ROUTES: tuple[Route, ...] = (
    Route(
        path="/v1/chat/completions",
        method="POST",
        handler=chat.create_chat_completion,
        summary="The assistant's next message in a conversation",
        body=ChatRequest,
        generates=True,
    ),
    Route(
        path="/v1/chat/completions/batch",
        method="POST",
        handler=chat_batch.create_chat_completions,
        summary="The assistant's next message in each of several conversations",
        body=ChatBatchRequest,
        generates=True,
    ),
    Route(
        path="/v1/completions",
        method="POST",
        handler=completions.create_completion,
        summary="Continue prompts",
        body=CompletionRequest,
        generates=True,
    ),
    Route(
        path="/v1/responses",
        method="POST",
        handler=responses.create_response,
        summary="The assistant's next message, in the form of OpenAI's Responses API",
        body=ResponsesRequest,
        generates=True,
    ),
    Route(
        path="/v1/responses/{response_id}",
        method="GET",
        handler=stored_responses.show_response,
        summary="A stored response",
    ),
    Route(
        path="/v1/responses/{response_id}",
        method="DELETE",
        handler=stored_responses.delete_response,
        summary="Delete a stored response; one that is still generated is cancelled",
    ),
    Route(
        path="/v1/responses/{response_id}/input_items",
        method="GET",
        handler=stored_responses.list_input_items,
        summary="The items that a stored response is the answer to",
    ),
    Route(
        path="/v1/responses/{response_id}/cancel",
        method="POST",
        handler=stored_responses.cancel_response,
        summary="Cancel a response that is generated in the background",
    ),
    Route(
        path="/v1/messages",
        method="POST",
        handler=messages.create_message,
        summary="The assistant's next message, in the form of Anthropic's Messages API",
        body=MessagesRequest,
        generates=True,
    ),
    Route(
        path="/v1/messages/count_tokens",
        method="POST",
        handler=messages.count_tokens,
        summary="The number of tokens of a message's prompt",
        body=CountTokensRequest,
    ),
    Route(
        path="/v1/embeddings",
        method="POST",
        handler=embeddings.create_embeddings,
        summary="Embeddings of prompts",
        body=EmbeddingRequest,
        generates=True,
    ),
    Route(
        path="/v2/embed",
        method="POST",
        handler=embeddings.create_cohere_embeddings,
        summary="Embeddings of texts, in the form of Cohere's API",
        body=CohereEmbedRequest,
        generates=True,
    ),
    *(
        Route(
            path=path,
            method="POST",
            handler=scoring.create_ranking,
            summary="Documents in the order of their relevance for a query",
            body=RerankRequest,
            generates=True,
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Route(
            path=path,
            method="POST",
            handler=scoring.create_scores,
            summary="How relevant texts are for others",
            body=ScoreRequest,
            generates=True,
        )
        for path in ("/v1/score", "/score")
    ),
    Route(
        path="/classify",
        method="POST",
        handler=embeddings.create_classification,
        summary="The probability of each label of a classifier",
        body=ClassifyRequest,
        generates=True,
    ),
    Route(
        path="/pooling",
        method="POST",
        handler=embeddings.create_pooling,
        summary="What a pooling model makes of prompts: embeddings, or the outputs of a classifier",
        body=PoolingRequest,
        generates=True,
    ),
    Route(
        path="/invocations",
        method="POST",
        handler=sagemaker.invoke,
        summary="A chat, a completion, embeddings or scores, by the fields of the body; for Amazon SageMaker",
        body=InvocationRequest,
        generates=True,
    ),
    Route(
        path="/tokenize",
        method="POST",
        handler=tokenize.tokenize_text,
        summary="The tokens of a prompt or a conversation",
        body=TokenizeRequest,
    ),
    Route(
        path="/detokenize",
        method="POST",
        handler=tokenize.detokenize,
        summary="The text of tokens",
        body=DetokenizeRequest,
    ),
    Route(
        path="/v1/files",
        method="POST",
        handler=files.create_file,
        summary="Upload a file of requests for a batch",
        streams_body=True,
    ),
    Route(path="/v1/files", method="GET", handler=files.list_files, summary="The files of this key"),
    Route(path="/v1/files/{file_id}", method="GET", handler=files.show_file, summary="One file"),
    Route(path="/v1/files/{file_id}", method="DELETE", handler=files.delete_file, summary="Delete a file"),
    Route(
        path="/v1/files/{file_id}/content",
        method="GET",
        handler=files.show_content,
        summary="The content of a file",
        content_type="application/octet-stream",
    ),
    Route(
        path="/v1/batches",
        method="POST",
        handler=batches.create_batch,
        summary="Start a batch: answer all requests of a file",
        body=BatchRequest,
    ),
    Route(path="/v1/batches", method="GET", handler=batches.list_batches, summary="The batches of this key"),
    Route(path="/v1/batches/{batch_id}", method="GET", handler=batches.show_batch, summary="The state of a batch"),
    Route(
        path="/v1/batches/{batch_id}/cancel",
        method="POST",
        handler=batches.cancel_batch,
        summary="Cancel a batch; finished requests are kept",
    ),
    Route(path="/v1/models", method="GET", handler=models.list_models, summary="The model and its adapters, as a list"),
    Route(
        path="/v1/models/{model}", method="GET", handler=models.show_model, summary="The model, or one of its adapters"
    ),
    Route(
        path="/v1/load_lora_adapter",
        method="POST",
        handler=adapters.load_adapter,
        summary="Load a LoRA adapter",
        body=LoadAdapterRequest,
        is_control=True,
        content_type="text/plain",
    ),
    Route(
        path="/v1/unload_lora_adapter",
        method="POST",
        handler=adapters.unload_adapter,
        summary="Unload a LoRA adapter; requests that run with it go on to their end",
        body=UnloadAdapterRequest,
        is_control=True,
        content_type="text/plain",
    ),
    Route(
        path="/adapters",
        method="POST",
        handler=adapters.load_sagemaker_adapter,
        summary="Load a LoRA adapter; for Amazon SageMaker",
        body=SageMakerAdapterRequest,
        is_control=True,
        content_type="text/plain",
    ),
    Route(
        path="/adapters/{name}",
        method="DELETE",
        handler=adapters.unload_sagemaker_adapter,
        summary="Unload a LoRA adapter; for Amazon SageMaker",
        is_control=True,
        content_type="text/plain",
    ),
    Route(
        path="/tokenizer_info",
        method="GET",
        handler=tokenize.tokenizer_info,
        summary="What a client needs to tokenize as the model does",
    ),
    Route(path="/health", method="GET", handler=status.health, summary="Whether the server is alive", auth="none"),
    Route(path="/ready", method="GET", handler=status.ready, summary="Whether it takes requests", auth="none"),
    Route(path="/ping", method="GET", handler=status.health, summary="The same as /health", auth="none"),
    Route(path="/ping", method="POST", handler=status.health, summary="The same as /health", auth="none"),
    Route(path="/version", method="GET", handler=status.version, summary="Its version"),
    Route(
        path="/server_info",
        method="GET",
        handler=server_info.show,
        summary="Every setting in use, with its source and reason",
    ),
    Route(path="/alerts", method="GET", handler=alerts.show, summary="The state of every alert"),
    Route(path="/load", method="GET", handler=status.load, summary="The number of requests in progress"),
    Route(
        path="/metrics",
        method="GET",
        handler=status.metrics,
        summary="Metrics for Prometheus",
        content_type="text/plain",
    ),
    Route(
        path="/bottleneck",
        method="GET",
        handler=status.bottleneck,
        summary="What limits the server, with its numbers, and what to change",
    ),
    Route(
        path="/",
        method="GET",
        handler=dashboard.page,
        summary="The dashboard page; it has no data of its own",
        auth="none",
        content_type="text/html",
    ),
    Route(
        path="/dashboard/data",
        method="GET",
        handler=dashboard.data,
        summary="Figures of this moment, and samples of the last hour from number `since` on",
    ),
    Route(path="/openapi.json", method="GET", handler=show_openapi, summary="This document"),
    Route(
        path="/docs",
        method="GET",
        handler=docs.page,
        summary="The routes and the fields of their bodies, as a page; it has no data of its own",
        auth="none",
        content_type="text/html",
    ),
    Route(
        path="/sleep",
        method="POST",
        handler=sleep.sleep,
        summary="Free the memory of the engine until it is woken",
        is_control=True,
    ),
    Route(
        path="/wake_up",
        method="POST",
        handler=sleep.wake_up,
        summary="Load the engine again",
        is_control=True,
    ),
    Route(
        path="/is_sleeping",
        method="GET",
        handler=sleep.is_sleeping,
        summary="Whether the engine sleeps",
        is_control=True,
    ),
    Route(
        path="/start_profile",
        method="POST",
        handler=profile.start_profile,
        summary="Record the engine's steps from now on",
        body=StartProfileRequest,
        needs_body=False,
        is_control=True,
    ),
    Route(
        path="/stop_profile",
        method="POST",
        handler=profile.stop_profile,
        summary="End the profile and return its report",
        body=StopProfileRequest,
        needs_body=False,
        is_control=True,
    ),
    Route(
        path="/admin/info",
        method="GET",
        handler=admin.info,
        summary="The settings in use, with the reason for each",
        auth="admin",
    ),
    Route(
        path="/admin/drain",
        method="POST",
        handler=admin.drain,
        summary="Finish running requests, take no new ones, and stop",
        auth="admin",
    ),
    Route(
        path="/admin/reload_keys",
        method="POST",
        handler=admin.reload_keys,
        summary="Read the file of keys again",
        auth="admin",
    ),
    Route(
        path="/admin/reset_prefix_cache",
        method="POST",
        handler=admin.reset_prefix_cache,
        summary="Empty the prefix cache",
        auth="admin",
    ),
    Route(
        path="/admin/start_profile",
        method="POST",
        handler=profile.start_profile,
        summary="Record the engine's steps from now on",
        auth="admin",
    ),
    Route(
        path="/admin/stop_profile",
        method="POST",
        handler=profile.stop_profile,
        summary="End the profile and return its report",
        auth="admin",
    ),
)
